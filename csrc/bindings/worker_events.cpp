// The functions that torch_rpc_ext/events.py calls.

#include "agent/worker_events.h"
#include "agent/ucx_agent.h"
#include "bindings/bindings.h"

#include <pybind11/stl.h>

#include <optional>
#include <tuple>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
using agent::UcxAgent;
using agent::WorkerEvents;

namespace {

using PlainEvent = std::tuple<const char*, std::string, std::string>;

const char* nameOf(WorkerEvents::Kind kind) {
  switch (kind) {
    case WorkerEvents::Kind::kJoined:
      return "joined";
    case WorkerEvents::Kind::kReturned:
      return "returned";
    case WorkerEvents::Kind::kLost:
      return "lost";
    case WorkerEvents::Kind::kLeft:
      return "left";
    case WorkerEvents::Kind::kBegan:
      return "began";
    case WorkerEvents::Kind::kEnded:
      break;
  }
  return "ended";
}

PlainEvent plainEvent(const WorkerEvents::Event& event) {
  return {nameOf(event.kind), event.worker, event.reason};
}

void beginWorkerEvents(UcxAgent& agent) {
  agent.parts().group().events().begin();
}

std::optional<PlainEvent> nextWorkerEvent(UcxAgent& agent, float seconds) {
  const auto event =
      agent.parts().group().events().next(agent::toMilliseconds(seconds));
  return event ? std::optional(plainEvent(*event)) : std::nullopt;
}

} // namespace

void bindWorkerEvents(py::module_& module) {
  module.def(
      "begin_worker_events",
      &beginWorkerEvents,
      py::call_guard<py::gil_scoped_release>(),
      py::arg("agent"));
  module.def(
      "next_worker_event",
      &nextWorkerEvent,
      py::call_guard<py::gil_scoped_release>(),
      py::arg("agent"),
      py::arg("seconds"));
}

} // namespace torch_rpc_ext::bindings
