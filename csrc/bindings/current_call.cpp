// _C.ServedCall: what a remote function may ask about the call that it serves.

#include "agent/rpc_error.h"
#include "agent/served_call.h"
#include "agent/ucx_agent.h"
#include "base/log.h"
#include "bindings/bindings.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace rpc = torch::distributed::rpc;
using agent::ServedCall;
using agent::UcxAgent;
using agent::WaitingBytes;

namespace {

// A program may keep this for longer than RPC runs, so this keeps nothing of
// the agent.
struct PyServedCall {
  std::weak_ptr<transport::Connection> connection;
  ServedCall::Clock::time_point deadline;
  uint64_t bytes;
  std::string caller;
  std::weak_ptr<UcxAgent> agent;
};

// std::nullopt on a thread that serves no call.
std::optional<PyServedCall> currentCall() {
  const ServedCall* const call = ServedCall::current();
  if (call == nullptr || !rpc::RpcAgent::isCurrentRpcAgentSet()) {
    return std::nullopt;
  }
  const auto ours =
      std::dynamic_pointer_cast<UcxAgent>(rpc::RpcAgent::getCurrentRpcAgent());
  if (ours == nullptr) {
    return std::nullopt;
  }
  return PyServedCall{
      call->connection,
      call->deadline,
      call->bytes,
      ours->parts().group().peers().nameOf(call->connection.get()),
      ours};
}

// In seconds of time.monotonic().
std::optional<double> deadlineOf(const PyServedCall& self) {
  if (self.deadline == ServedCall::Clock::time_point::max()) {
    return std::nullopt;
  }
  return std::chrono::duration<double>(self.deadline.time_since_epoch())
      .count();
}

// As ServedCall::cancelled(). A connection that is gone has ended.
bool isCancelled(const PyServedCall& self) {
  const auto connection = self.connection.lock();
  return connection == nullptr ||
      ServedCall{.connection = connection, .deadline = self.deadline}
          .cancelled();
}

// Logs what the callback raises: there is no caller to get the exception, and
// it must not end the agent's thread.
void tell(const std::function<void()>& callback) {
  try {
    callback();
  } catch (const std::exception& error) {
    base::log(
        base::LogLevel::kWarning,
        std::string("a callback for a lost caller raised: ") + error.what());
  }
}

// Returns the callback's number for forget(); 0 if the caller is lost already.
uint64_t whenLost(const PyServedCall& self, std::function<void()> callback) {
  const auto agent = self.agent.lock();
  const auto connection = self.connection.lock();
  return agent == nullptr || connection == nullptr
      ? 0
      : agent->parts().server().lostCallers().add(
            connection, [callback = std::move(callback)] { tell(callback); });
}

void forget(const PyServedCall& self, uint64_t number) {
  if (const auto agent = self.agent.lock()) {
    agent->parts().server().lostCallers().remove(number);
  }
}

// See Server::hold().
WaitingBytes::Held hold(const PyServedCall& self) {
  const auto agent = self.agent.lock();
  if (agent == nullptr) {
    return {}; // RPC has ended
  }
  auto& parts = agent->parts();
  auto held = parts.server().hold(self.bytes, /*mayRefuse=*/true);
  if (!held.ok()) {
    throw agent::RpcError(
        held.error().kind, parts.group().self().name_, held.error().message);
  }
  return std::move(held.value());
}

} // namespace

void bindCurrentCall(py::module_& module) {
  py::class_<PyServedCall>(module, "ServedCall")
      .def_readonly("caller", &PyServedCall::caller)
      .def_property_readonly("deadline", &deadlineOf)
      .def_property_readonly("cancelled", &isCancelled)
      .def("when_lost", &whenLost, py::arg("callback"))
      .def("forget", &forget, py::arg("number"))
      .def("hold", &hold);
  py::class_<WaitingBytes::Held>(module, "HeldCall")
      .def("release", &WaitingBytes::Held::release);
  module.def(
      "current_call",
      &currentCall,
      "The call that this thread serves; None for none.");
}

} // namespace torch_rpc_ext::bindings
