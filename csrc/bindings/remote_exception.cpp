#include "bindings/remote_exception.h"

#include <torch/csrc/distributed/rpc/python_resp.h>
#include <torch/csrc/distributed/rpc/python_rpc_handler.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace rpc = torch::distributed::rpc;

namespace {

// Source: torch_rpc_ext/_upstream/payloads.py
constexpr std::string_view kRaised("\x01Raised", 7);

// Carries a Python exception through C++ futures, which copy, rethrow and
// destroy it on threads without the GIL.
class PythonException : public std::runtime_error {
 public:
  PythonException(const std::string& text, py::object exception)
      : std::runtime_error(text),
        exception_(new py::object(std::move(exception)), [](py::object* held) {
          py::gil_scoped_acquire gil;
          delete held;
        }) {}

  // Raises the exception, and keeps a copy for the next time. The exception
  // itself must not stay here: its traceback refers to the frames that wait for
  // the future, those refer to the future, the future to this object, and
  // Python's garbage collector does not see that circle. The caller holds the
  // GIL.
  void raise() const {
    const py::object raised = *exception_;
    try {
      *exception_ = py::module_::import("torch_rpc_ext._upstream.exceptions")
                        .attr("another")(raised);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a copy of a remote exception");
    }
    PyErr_SetObject(
        reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  }

  // The caller holds the GIL.
  py::object exception() const {
    return *exception_;
  }

 private:
  std::shared_ptr<py::object> exception_;
};

// The text of an object in UTF-8. A text may hold what UTF-8 does not have,
// such as the name of a file whose bytes are no UTF-8.
std::string bytesOf(const py::object& object) {
  return py::str(object)
      .attr("encode")("utf-8", "backslashreplace")
      .cast<std::string>();
}

} // namespace

std::exception_ptr pythonException(py::error_already_set& error) {
  const py::gil_scoped_acquire gil;
  const std::string text = error.what();
  const py::object exception = error.value();
  if (error.trace()) {
    PyException_SetTraceback(exception.ptr(), error.trace().ptr());
  }
  auto carried = std::make_exception_ptr(PythonException(text, exception));
  error.restore(); // releases the references now, while the GIL is held
  PyErr_Clear();
  return carried;
}

std::exception_ptr decodeRemoteException(const rpc::Message& response) {
  if (response.type() != rpc::MessageType::PYTHON_RET &&
      response.type() != rpc::MessageType::FORWARD_AUTOGRAD_RESP &&
      response.type() != rpc::MessageType::RUN_WITH_PROFILING_RESP) {
    return nullptr;
  }
  // Distributed autograd and the profiler append their data, so the marker is
  // still in front.
  const auto& payload = response.payload();
  if (!std::string_view(payload.data(), payload.size()).starts_with(kRaised)) {
    return nullptr;
  }
  py::gil_scoped_acquire gil;
  try {
    const py::object exception =
        py::module_::import("torch_rpc_ext._upstream.exceptions")
            .attr("from_response")(
                py::bytes(payload.data(), payload.size()), response.tensors());
    if (exception.is_none()) {
      return nullptr;
    }
    const auto type = py::type::of(exception);
    const std::string text =
        bytesOf(type.attr("__name__")) + ": " + bytesOf(exception);
    return std::make_exception_ptr(PythonException(text, exception));
  } catch (py::error_already_set& error) {
    // Either the response cannot be unpickled, or a signal handler has raised
    // meanwhile. The future gets this exception.
    return pythonException(error);
  }
}

c10::intrusive_ptr<rpc::Message> encodeRemoteException(
    const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PythonException& raised) {
    auto& handler = rpc::PythonRpcHandler::getInstance(); // without the GIL
    const py::gil_scoped_acquire gil;
    try {
      const py::object described =
          py::module_::import("torch_rpc_ext._upstream.exceptions")
              .attr("relayed")(raised.exception());
      return described.is_none()
          ? nullptr
          : rpc::PythonResp(handler.serialize(described)).toMessage();
    } catch (py::error_already_set& problem) {
      problem.discard_as_unraisable("sending a remote exception on");
      return nullptr;
    }
  } catch (...) {
    return nullptr;
  }
}

void bindRemoteException(py::module_& /*module*/) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (const PythonException& error) {
      error.raise();
    }
  });
}

} // namespace torch_rpc_ext::bindings
