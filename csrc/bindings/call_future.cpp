#include "bindings/call_future.h"

#include <stdexcept>
#include <utility>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace jit = torch::jit;
namespace rpc = torch::distributed::rpc;
using agent::AnswerWait;

namespace {

// `add`, a method of upstream's class, for Python. Upstream gives a callback
// the Python object of the future, which the base class would not find for a
// CallFuture, so the callback gets that object here.
template <typename Result>
auto givingItself(Result (jit::PythonFutureWrapper::*add)(py::function)) {
  return [add](const py::object& self, const py::function& callback) {
    auto& future = self.cast<CallFuture&>();
    py::function given =
        py::cpp_function([self, callback](const py::object& /*base*/) {
          return callback(self);
        });
    const py::gil_scoped_release release;
    return (future.*add)(std::move(given));
  };
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
      agent->parts().caller().await(call_, *fut);
    }
  }
  return PythonFutureWrapper::wait();
}

void bindCallFuture(py::module_& module) {
  py::class_<CallFuture, jit::PythonFutureWrapper, CallFuturePtr>(
      module, "CallFuture", "The future of rpc_async().")
      .def("wait", &CallFuture::wait, py::call_guard<py::gil_scoped_release>())
      .def("then", givingItself(&CallFuture::then), py::arg("callback"))
      .def(
          "add_done_callback",
          givingItself(&CallFuture::add_done_callback),
          py::arg("callback"));
}

} // namespace torch_rpc_ext::bindings
