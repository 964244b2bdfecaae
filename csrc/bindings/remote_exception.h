#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace torch_rpc_ext::bindings {

// The Python exception that a remote function raised, for a response that
// carries one; null for any other. Upstream turns all but ValueError and
// TypeError into RuntimeError (pytorch issue 45044). Takes the GIL only for
// responses that look like one.
std::exception_ptr decodeRemoteException(
    const torch::distributed::rpc::Message& response);

// What Python raised, for a future: raised again as it is where somebody waits.
// Takes the GIL; the result needs none.
std::exception_ptr pythonException(pybind11::error_already_set& error);

void bindRemoteException(pybind11::module_& module);

} // namespace torch_rpc_ext::bindings
