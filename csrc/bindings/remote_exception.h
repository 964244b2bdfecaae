#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace torch_rpc_ext::bindings {

// The Python exception that a response carries, because the remote function
// raised it; null for any other response. Upstream turns every exception except
// ValueError and TypeError into a RuntimeError (pytorch issue 45044). Takes the
// GIL only if the response begins like one with an exception.
std::exception_ptr decodeRemoteException(
    const torch::distributed::rpc::Message& response);

// The response that carries a Python exception which a call of this worker has
// raised, on to the worker that waits for that call; null for any other error.
// Takes the GIL.
c10::intrusive_ptr<torch::distributed::rpc::Message> encodeRemoteException(
    const std::exception_ptr& error);

// Wraps a Python exception for a future: the first thread that waits for the
// future raises the exception, each further wait raises a copy. Takes the GIL;
// to copy and to destroy the result, the caller need not hold the GIL.
std::exception_ptr pythonException(pybind11::error_already_set& error);

void bindRemoteException(pybind11::module_& module);

} // namespace torch_rpc_ext::bindings
