#include "agent/ucx_agent.h"

#include "agent/thread_state.h"
#include "agent/transports.h"
#include "base/log.h"
#include "base/synchronized.h"

#include <c10/util/StringUtil.h>

#include <exception>
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
      options_(std::move(options)),
      startHook_(std::move(hooks.start)),
      executor_(
          static_cast<size_t>(options_.numWorkerThreads),
          options_.busyPoll),
      memory_(
          options_,
          executor_,
          executor_.poller(),
          [this](ReceiveMemory::Duration idle) { return trimParts(idle); }),
      group_(
          workerInfo_,
          isStaticGroup,
          makeRemoteContext(options_),
          makeLoopbackContext(options_),
          executor_,
          listeners(hooks)),
      devices_(
          options_.useCudaIpc,
          std::move(hooks.kernels),
          executor_,
          memory_,
          group_.peers()),
      caller_(
          options_,
          executor_,
          counters_,
          memory_,
          group_,
          devices_,
          std::move(hooks.decodeException)),
      forkRequests_(executor_, group_, caller_),
      server_(options_, executor_, counters_, memory_, group_, devices_, *cb_),
      groupShutdown_(
          group_,
          caller_,
          server_.answers(),
          devices_,
          std::move(hooks.checkInterrupt)),
      receiver_(
          executor_,
          counters_,
          memory_,
          group_,
          devices_,
          caller_,
          server_,
          groupShutdown_) {
  executor_.setThreadScope(std::move(hooks.threadScope));
  executor_.setAfterTask(restoreThreadState);
}

UcxAgent::~UcxAgent() {
  if (rpcAgentRunning_.load()) {
    shutdown();
  }
}

Group::Listeners UcxAgent::listeners(AgentHooks& hooks) {
  return {
      .ended =
          [this](
              const transport::ConnectionPtr& connection,
              const base::Error& error) {
            memory_.admission().forget(connection.get());
            caller_.lose(connection.get(), error);
            server_.lose(connection.get());
          },
      .gone = [this](
                  const std::string& worker,
                  bool exited) { devices_.gone(worker, exited); },
      .dropValues = std::move(hooks.dropValues)};
}

bool UcxAgent::trimParts(ReceiveMemory::Duration idle) {
  const bool more = group_.trim(idle);
  return devices_.trim(idle) || more;
}

// ---- lifecycle -------------------------------------------------------------

void UcxAgent::startImpl() {
  if (startHook_) {
    startHook_();
  }
  group_.start(executor_.poller(), *this);
  executor_.start();
}

void UcxAgent::join(bool /*shutdown*/, float timeout) {
  // Members of a dynamic group leave one by one.
  if (group_.isStatic() && rpcAgentRunning_.load()) {
    groupShutdown_.join(timeout);
  }
}

void UcxAgent::stop() {
  if (stopped_.exchange(true)) {
    return;
  }
  group_.leave();
  forkRequests_.stop(); // it would send again what failAll() fails
  // Before the parts below, so that the threads that wait for answers can end.
  caller_.failAll({base::ErrorKind::kShutDown, "this worker shut down"});
  devices_.stop(kStopPatience); // needs the transport: see Devices::stop()
  group_.stop();
  // Drops the requests that wait for room: after group_.stop(), so that their
  // callers see a connection end and not a refusal; before server_.stop(), so
  // that Creations still serves what waits for the dropped requests.
  memory_.stop();
  server_.stop();
  caller_.stop();
  if (!executor_.stop(static_cast<int>(kStopPatience.count()))) {
    base::log(
        base::LogLevel::kWarning,
        "shutdown: a function that a peer called is still running after " +
            std::to_string(
                std::chrono::duration_cast<std::chrono::seconds>(kStopPatience)
                    .count()) +
            " s; it is left alone and its result is dropped");
    // Its thread uses this agent until the process ends.
    static base::Synchronized<std::vector<std::shared_ptr<rpc::RpcAgent>>>
        abandoned;
    abandoned.lock()->push_back(rpc::RpcAgent::getCurrentRpcAgent());
  }
  memory_.close(); // last: threads that end still give blocks back
}

// ---- calls -----------------------------------------------------------------

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
  return message->type() == rpc::MessageType::RREF_FORK_REQUEST
      ? forkRequests_.send(to, message, timeout)
      : caller_.send(to, message, timeout, deviceMap);
}

void UcxAgent::addGilWaitTime(std::chrono::microseconds wait) {
  server_.addGilWaitTime(wait);
}

// ---- the group and its devices ---------------------------------------------

const rpc::WorkerInfo& UcxAgent::getWorkerInfo(const std::string& name) const {
  return group_.membership().byName(name);
}

const rpc::WorkerInfo& UcxAgent::getWorkerInfo(rpc::worker_id_t id) const {
  return group_.membership().byId(id);
}

std::vector<rpc::WorkerInfo> UcxAgent::getWorkerInfos() const {
  return group_.membership().all();
}

rpc::DeviceMap UcxAgent::getDeviceMap(const rpc::WorkerInfo& to) const {
  const device::Map* const map = devices_.tables().mapTo(to.name_);
  return map == nullptr ? rpc::DeviceMap{} : *map;
}

const std::vector<c10::Device>& UcxAgent::getDevices() const {
  return devices_.used();
}

// ---- what it tells about itself --------------------------------------------

Metrics UcxAgent::getMetrics() {
  Metrics metrics;
  addMetrics(counters_, metrics);
  addMetrics(executor_, metrics);
  memory_.addTo(metrics);
  group_.addTo(metrics);
  devices_.addTo(metrics);
  caller_.addTo(metrics);
  server_.addTo(metrics);
  if (isGILProfilingEnabled()) {
    addGilMetrics(counters_, metrics);
  }
  return metrics;
}

Metrics UcxAgent::getDebugInfo() {
  auto info = getMetrics();
  for (const auto& [name, path] : group_.peers().paths()) {
    info["agent.peer." + name + ".control"] = path.control;
    info["agent.peer." + name + ".bulk"] = path.bulk;
  }
  return info;
}

void UcxAgent::beginCallLog(size_t most) {
  gilProfiled_.store(isGILProfilingEnabled());
  enableGILProfiling(true);
  caller_.log().begin(most);
  server_.log().begin(most);
}

UcxAgent::LoggedCalls UcxAgent::endCallLog() {
  if (caller_.log().on()) {
    enableGILProfiling(gilProfiled_.load());
  }
  return {caller_.log().end(), server_.log().end()};
}

// ---- transport::Handler ----------------------------------------------------

std::string UcxAgent::introduction() {
  return group_.introduction();
}

base::Error UcxAgent::onAccept(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  return group_.onAccept(connection, hello);
}

base::Error UcxAgent::onConnected(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  return group_.onConnected(connection, hello);
}

void UcxAgent::onFrame(
    const transport::ConnectionPtr& connection,
    std::unique_ptr<transport::Incoming> incoming) {
  receiver_.onFrame(connection, std::move(incoming));
}

void UcxAgent::onClosed(
    const transport::ConnectionPtr& connection,
    const base::Error& error) {
  group_.onClosed(connection, error);
}

} // namespace torch_rpc_ext::agent
