#include "bindings/call_future.h"

#include "bindings/python_thread.h"

#include <stdexcept>
#include <utility>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace jit = torch::jit;
namespace rpc = torch::distributed::rpc;
using agent::AnswerWait;

namespace {

// Upstream gives a callback the Python object of the future, which the base
// class would not find for a CallFuture.
py::function givenItself(const py::object& future, py::function callback) {
  return py::cpp_function(
      [future, callback = std::move(callback)](const py::object& /*base*/) {
        return callback(future);
      });
}

} // namespace

CallFuture::CallFuture(
    const std::shared_ptr<rpc::RpcAgent>& agent,
    c10::intrusive_ptr<rpc::JitFuture> future,
    std::optional<UnwrapFunc> unwrap)
    : PythonFutureWrapper(std::move(future), std::move(unwrap)),
      agent_(
          fut->completed() ? nullptr
                           : std::dynamic_pointer_cast<agent::UcxAgent>(agent)),
      call_(AnswerWait::lastCall()) {
  if (const auto ours = agent_.lock()) {
    ours->parts().caller().setResult(call_.id, fut);
  }
}

py::object CallFuture::wait() {
  if (!fut->completed()) {
    if (!home_.isHere()) {
      throw std::runtime_error(
          "this process was forked while the call was under way: only the "
          "process that made the call gets its result");
    }
    if (const auto agent = agent_.lock()) {
      agent->parts().caller().await(
          call_, *fut, AnswerWait::Future::kShared, checkInterrupt);
    }
  }
  return PythonFutureWrapper::wait();
}

void bindCallFuture(py::module_& module) {
  py::class_<CallFuture, jit::PythonFutureWrapper, CallFuturePtr>(
      module, "CallFuture", "The future of rpc_async().")
      .def("wait", &CallFuture::wait, py::call_guard<py::gil_scoped_release>())
      .def(
          "then",
          [](const py::object& self, py::function callback) {
            auto& future = self.cast<CallFuture&>();
            auto given = givenItself(self, std::move(callback));
            const py::gil_scoped_release release;
            return future.then(std::move(given));
          },
          py::arg("callback"))
      .def(
          "add_done_callback",
          [](const py::object& self, py::function callback) {
            auto& future = self.cast<CallFuture&>();
            auto given = givenItself(self, std::move(callback));
            const py::gil_scoped_release release;
            future.add_done_callback(std::move(given));
          },
          py::arg("callback"));
}

} // namespace torch_rpc_ext::bindings
