#include "agent/ucx_agent.h"

#include "base/log.h"
#include "base/synchronized.h"

#include <c10/util/StringUtil.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace torch_rpc_ext::agent {

namespace {

// How long shutdown() waits for user functions that are still running.
constexpr auto kStopPatience = std::chrono::milliseconds(1000);

// The time-out of a call: `seconds` as the caller has given them, or `preset`
// where the caller gave upstream's kUnsetRpcTimeout; 0 is no time-out. Throws
// std::invalid_argument for negative numbers and NaN. Upstream accepts them,
// and gives up such a call at once or after an arbitrary time.
std::chrono::milliseconds callTimeout(
    float seconds,
    std::chrono::milliseconds preset) {
  if (seconds == rpc::kUnsetRpcTimeout) {
    if (preset.count() < 0) {
      throw std::invalid_argument(
          "the default time-out of calls is " + std::to_string(preset.count()) +
          " ms: give rpc._set_rpc_timeout() seconds, 0 for no time-out");
    }
    return preset;
  }
  if (!(seconds >= 0)) {
    throw std::invalid_argument(
        c10::str(
            "timeout must be a number of seconds, 0 for none, or -1 for the "
            "default of the options, got ",
            seconds));
  }
  return toMilliseconds(seconds);
}

} // namespace

UcxAgent::UcxAgent(
    AgentOptions options,
    const std::string& name,
    rpc::worker_id_t id,
    bool isStaticGroup,
    std::unique_ptr<rpc::RequestCallback> callback,
    AgentHooks hooks)
    : RpcAgent(
          rpc::WorkerInfo(name, id),
          std::move(callback),
          toMilliseconds(options.rpcTimeoutSeconds)),
      parts_(
          std::move(options),
          workerInfo_,
          isStaticGroup,
          *cb_,
          std::move(hooks)) {}

UcxAgent::~UcxAgent() {
  if (rpcAgentRunning_.load()) {
    shutdown();
  }
}

void UcxAgent::startImpl() {
  parts_.start();
}

void UcxAgent::join(bool /*shutdown*/, float timeout) {
  // Members of a dynamic group leave one by one.
  if (parts_.group().isStatic() && rpcAgentRunning_.load()) {
    parts_.groupShutdown().join(timeout);
  }
}

void UcxAgent::stop() {
  if (stopped_.exchange(true)) {
    return;
  }
  const bool ended = parts_.stop(kStopPatience);
  if (!ended) {
    base::log(
        base::LogLevel::kWarning,
        "shutdown: a function that a peer called is still running after " +
            std::to_string(
                std::chrono::duration_cast<std::chrono::seconds>(kStopPatience)
                    .count()) +
            " s; it is left alone and its result is dropped");
  }
  if (!ended || parts_.counters().serverActiveAsyncCalls.load() != 0) {
    // The function's thread, or whoever completes the future that a function
    // has returned, uses this agent until the process ends, also while static
    // objects are destroyed. So the list is never destroyed.
    static auto& abandoned =
        *new base::Synchronized<std::vector<std::shared_ptr<rpc::RpcAgent>>>();
    abandoned.lock()->push_back(rpc::RpcAgent::getCurrentRpcAgent());
  }
}

c10::intrusive_ptr<rpc::JitFuture> UcxAgent::send(
    const rpc::WorkerInfo& to,
    c10::intrusive_ptr<rpc::Message> message,
    float rpcTimeoutSeconds,
    const rpc::DeviceMap& deviceMap) {
  TORCH_CHECK(
      message->isRequest(), "UcxAgent::send(..) is only for sending requests.");
  if (!rpcAgentRunning_.load()) {
    throw std::runtime_error(
        c10::str(
            "Node ",
            workerInfo_.id_,
            " tried to send() a message of type ",
            static_cast<int>(message->type()),
            " but RPC is no longer running on this node."));
  }
  const auto timeout = callTimeout(rpcTimeoutSeconds, getRpcTimeout());
  switch (message->type()) {
    case rpc::MessageType::RREF_FORK_REQUEST:
      return parts_.forkRequests().send(to, message, timeout);
    case rpc::MessageType::RREF_USER_DELETE:
      return parts_.caller().release(to, message, timeout);
    case rpc::MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ:
      return parts_.contextCleanup().send(to, message, timeout);
    default:
      return parts_.caller().send(to, message, timeout, deviceMap);
  }
}

void UcxAgent::addGilWaitTime(std::chrono::microseconds wait) {
  parts_.server().addGilWaitTime(wait);
}

const rpc::WorkerInfo& UcxAgent::getWorkerInfo(const std::string& name) const {
  return parts_.group().membership().byName(name);
}

const rpc::WorkerInfo& UcxAgent::getWorkerInfo(rpc::worker_id_t id) const {
  return parts_.group().membership().byIdOrFormer(id);
}

std::vector<rpc::WorkerInfo> UcxAgent::getWorkerInfos() const {
  return parts_.group().membership().all();
}

rpc::DeviceMap UcxAgent::getDeviceMap(const rpc::WorkerInfo& to) const {
  const device::Map* const map = parts_.devices().tables().mapTo(to.name_);
  return map == nullptr ? rpc::DeviceMap{} : *map;
}

const std::vector<c10::Device>& UcxAgent::getDevices() const {
  return parts_.devices().used();
}

Metrics UcxAgent::getMetrics() {
  Metrics metrics;
  parts_.addTo(metrics);
  if (isGILProfilingEnabled()) {
    addGilMetrics(parts_.counters(), metrics);
  }
  return metrics;
}

Metrics UcxAgent::getDebugInfo() {
  auto info = getMetrics();
  for (const auto& [name, path] : parts_.group().peers().paths()) {
    info["agent.peer." + name + ".control"] = path.control;
    info["agent.peer." + name + ".bulk"] = path.bulk;
  }
  return info;
}

void UcxAgent::beginCallLog(size_t most) {
  gilProfiled_.store(isGILProfilingEnabled());
  enableGILProfiling(true);
  parts_.caller().log().begin(most);
  parts_.server().log().begin(most);
}

UcxAgent::LoggedCalls UcxAgent::endCallLog() {
  if (parts_.caller().log().on()) {
    enableGILProfiling(gilProfiled_.load());
  }
  return {parts_.caller().log().end(), parts_.server().log().end()};
}

} // namespace torch_rpc_ext::agent
