#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torch_rpc_ext::bindings {

void bindErrors(pybind11::module_& module);
void bindUcx(pybind11::module_& module);
void bindAgent(pybind11::module_& module);
void bindRRefs(pybind11::module_& module);
void bindCalls(pybind11::module_& module);
void bindCurrentCall(pybind11::module_& module);
void bindThreadState(pybind11::module_& module);
void bindWorkerEvents(pybind11::module_& module);
void bindWire(pybind11::module_& module);

} // namespace torch_rpc_ext::bindings
