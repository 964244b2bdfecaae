#include "agent/agent_parts.h"

#include "agent/thread_state.h"
#include "agent/transports.h"

#include <utility>

namespace torch_rpc_ext::agent {

AgentParts::AgentParts(
    AgentOptions options,
    const Group::WorkerInfo& self,
    bool isStaticGroup,
    torch::distributed::rpc::RequestCallback& callback,
    AgentHooks hooks)
    : options_(std::move(options)),
      startHook_(std::move(hooks.start)),
      executor_(
          static_cast<size_t>(options_.numWorkerThreads),
          options_.busyPoll),
      unreadRRefs_(executor_, hooks),
      memory_(
          options_,
          executor_,
          executor_.poller(),
          [this](ReceiveMemory::Duration idle) { return trimParts(idle); }),
      group_(
          self,
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
          unreadRRefs_,
          hooks),
      forkRequests_(executor_, group_, caller_),
      contextCleanup_(executor_, group_.peers(), caller_),
      server_(
          options_,
          executor_,
          counters_,
          memory_,
          group_,
          devices_,
          unreadRRefs_,
          callback,
          std::move(hooks.encodeException)),
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

Group::Listeners AgentParts::listeners(AgentHooks& hooks) {
  return {
      .ended =
          [this](
              const transport::ConnectionPtr& connection,
              const base::Error& error) {
            memory_.admission().forget(connection.get());
            caller_.lose(connection.get(), error);
            server_.lose(connection.get());
          },
      .lost = [this](
                  const std::string& worker,
                  bool exited) { devices_.lost(worker, exited); },
      .dropValues = std::move(hooks.dropValues)};
}

bool AgentParts::trimParts(ReceiveMemory::Duration idle) {
  const bool more = group_.trim(idle);
  return devices_.trim(idle) || more;
}

void AgentParts::start() {
  if (startHook_) {
    startHook_();
  }
  group_.start(executor_.poller(), *this);
  executor_.start();
}

bool AgentParts::stop(std::chrono::milliseconds patience) {
  group_.leave();
  forkRequests_.stop(); // it would send again what failAll() fails
  // Before the parts below, so that the threads that wait for answers can end.
  caller_.failAll({base::ErrorKind::kShutDown, "this worker shut down"});
  devices_.stop(patience); // needs the transport: see Devices::stop()
  group_.stop();
  // Drops the requests that wait for room: after group_.stop(), so that their
  // callers see a connection end and not a refusal; before server_.stop(), so
  // that Creations still serves what waits for the dropped requests.
  memory_.stop();
  server_.stop();
  caller_.stop();
  const bool ended = executor_.stop(static_cast<int>(patience.count()));
  memory_.close(); // last: threads that end still give blocks back
  return ended;
}

void AgentParts::addTo(Metrics& metrics) const {
  addMetrics(counters_, metrics);
  addMetrics(executor_, metrics);
  memory_.addTo(metrics);
  group_.addTo(metrics);
  devices_.addTo(metrics);
  caller_.addTo(metrics);
  server_.addTo(metrics);
}

// ---- transport::Handler ----------------------------------------------------

std::string AgentParts::introduction() {
  return group_.introduction();
}

base::Error AgentParts::onAccept(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  return group_.onAccept(connection, hello);
}

base::Error AgentParts::onConnected(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  return group_.onConnected(connection, hello);
}

void AgentParts::onFrame(
    const transport::ConnectionPtr& connection,
    std::unique_ptr<transport::Incoming> incoming) {
  receiver_.onFrame(connection, std::move(incoming));
}

std::shared_ptr<void> AgentParts::onFrameAhead(
    const transport::ConnectionPtr& connection) {
  return server_.frameAhead(connection.get());
}

void AgentParts::onClosed(
    const transport::ConnectionPtr& connection,
    const base::Error& error) {
  group_.onClosed(connection, error);
}

} // namespace torch_rpc_ext::agent
