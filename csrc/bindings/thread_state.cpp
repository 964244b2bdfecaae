// The state that torch keeps for each thread, for code of Python that takes
// turns on one thread.

#include "agent/thread_state.h"
#include "bindings/bindings.h"

#include <memory>
#include <utility>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
using agent::ThreadState;

void bindThreadState(py::module_& module) {
  py::class_<ThreadState>(module, "ThreadState", "From take_thread_state().")
      .def("give_back", &agent::giveBackThreadState);
  module.def(
      "take_thread_state",
      [] {
        auto taken = agent::takeThreadState();
        return taken ? std::make_unique<ThreadState>(std::move(*taken))
                     : nullptr;
      },
      "Give this thread the state of a new one; return the state that it had, "
      "None for that of a new one.");
}

} // namespace torch_rpc_ext::bindings
