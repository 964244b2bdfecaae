#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torch_rpc_ext::bindings {

// Raises a TypeError for arguments that contain themselves, and for RRefs whose
// type torch cannot write down: its code for TorchScript would end the process.
void requireScriptArguments(
    const pybind11::tuple& args,
    const pybind11::dict& kwargs);

} // namespace torch_rpc_ext::bindings
