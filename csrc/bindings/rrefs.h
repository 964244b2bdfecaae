#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torch_rpc_ext::bindings {

// Raises a TypeError if the arguments contain themselves, or contain an RRef
// whose type torch cannot write into a message: torch's code for TorchScript
// would crash the process on either.
void requireScriptArguments(
    const pybind11::tuple& args,
    const pybind11::dict& kwargs);

} // namespace torch_rpc_ext::bindings
