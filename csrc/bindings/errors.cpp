// Translates agent::RpcError to the Python class of torch_rpc_ext.errors for
// its kind.

#include "agent/rpc_error.h"
#include "bindings/bindings.h"

namespace torch_rpc_ext::bindings {

namespace py = pybind11;

namespace {

const char* classOf(base::ErrorKind kind) {
  switch (kind) {
    case base::ErrorKind::kPeerLost:
      return "PeerLostError";
    case base::ErrorKind::kTimedOut:
      return "CallTimeoutError";
    case base::ErrorKind::kRefused:
      return "RefusedError";
    case base::ErrorKind::kOverloaded:
      return "OverloadedError";
    case base::ErrorKind::kShutDown:
      return "ShutDownError";
    case base::ErrorKind::kCorrupted:
      return "IntegrityError";
    case base::ErrorKind::kNotInGroup:
      return "NotInGroupError";
    default:
      return "RpcError";
  }
}

void raise(const agent::RpcError& error) {
  const py::object type =
      py::module_::import("torch_rpc_ext.errors").attr(classOf(error.kind()));
  py::object instance = type(error.what());
  instance.attr("worker") = error.worker().empty()
      ? py::object(py::none())
      : py::object(py::str(error.worker()));
  PyErr_SetObject(type.ptr(), instance.ptr());
}

} // namespace

void bindErrors(py::module_& /*module*/) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (const agent::RpcError& error) {
      raise(error);
    }
  });
}

} // namespace torch_rpc_ext::bindings
