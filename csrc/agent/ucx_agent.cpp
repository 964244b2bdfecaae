#include "agent/ucx_agent.h"

#include "agent/thread_state.h"
#include "agent/transports.h"
#include "base/log.h"

#include <utility>

namespace torch_rpc_ext::agent {

namespace {

// How long shutdown() waits for user functions that are still running.
constexpr int kStopMilliseconds = 1000;

} // namespace

UcxAgent::UcxAgent(
    AgentOptions options,
    const std::string& name,
    rpc::worker_id_t id,
    bool isStaticGroup,
    std::unique_ptr<rpc::RequestCallback> callback)
    : RpcAgent(
          rpc::WorkerInfo(name, id),
          std::move(callback),
          toMilliseconds(options.rpcTimeoutSeconds)),
      options_(std::move(options)),
      isStaticGroup_(isStaticGroup),
      executor_(static_cast<size_t>(options_.numWorkerThreads)),
      cache_(std::make_shared<memory::BufferCache>(options_.receiveCacheBytes)),
      lender_(*cache_, executor_),
      remote_(makeRemoteContext(options_)),
      loopback_(makeLoopbackContext(options_)),
      peers_(
          membership_,
          Hello{.group = {}, .workerId = id, .name = name},
          remote_,
          loopback_),
      pending_(
          executor_.poller(),
          [this](PendingCall call) {
            metrics::add(counters_.callsTimedOut, 1);
            failLater(
                std::move(call), {base::ErrorKind::kTimedOut, std::string()});
          }),
      load_(options_.maxCallsInFlight, options_.maxBytesInFlight),
      admission_(options_.receiveBudgetBytes),
      queuedFrames_(options_.receiveBudgetBytes),
      ipc_(std::make_shared<device::Ipc>(options_.useCudaIpc, ipcLinks())),
      trimTimer_(executor_.poller(), [this] { trim(); }) {
  executor_.setAfterTask(restoreThreadState);
  executor_.setFullHook([this](size_t waiting, double seconds) {
    const std::string running = runningRequests_.describe();
    waiting += admission_.load().waitingRequests;
    base::log(
        base::LogLevel::kWarning,
        "all " + std::to_string(executor_.requestThreads()) +
            " threads for requests have been busy for " +
            std::to_string(static_cast<int>(seconds)) + " s, and " +
            std::to_string(waiting) + " requests wait. Running: " +
            (running.empty() ? "the copies of arguments and answers"
                             : running) +
            ". More threads (option num_worker_threads) or shorter functions "
            "would help");
  });
}

UcxAgent::~UcxAgent() {
  if (rpcAgentRunning_.load()) {
    shutdown();
  }
}

// ---- lifecycle -------------------------------------------------------------

void UcxAgent::startImpl() {
  if (startHook_) {
    startHook_();
  }
  remote_->start(executor_.poller(), executor_, *this);
  loopback_->start(executor_.poller(), executor_, *this);
  executor_.start();
}

void UcxAgent::shutdownImpl() {
  if (stopped_.exchange(true)) {
    return;
  }
  events_.end();
  // First the calls: threads that wait for one must be able to end.
  load_.stop();
  for (auto& call : pending_.takeAll()) {
    failLater(
        std::move(call), {base::ErrorKind::kShutDown, "this worker shut down"});
  }
  deviceEvents_.stop();
  // Who still copies from devices here says so in a moment.
  ipc_->waitUntilReleased(
      std::chrono::steady_clock::now() +
      std::chrono::milliseconds(kStopMilliseconds));
  ipc_->stop();
  remote_->stop();
  loopback_->stop();
  admission_.stop(); // after its callers know that it is the end
  creations_.stop();
  pending_.stop();
  trimTimer_.stop();
  if (!executor_.stop(kStopMilliseconds)) {
    base::log(
        base::LogLevel::kWarning,
        "shutdown: a function that a peer called is still running after " +
            std::to_string(kStopMilliseconds / 1000) +
            " s; it is left alone and its result is dropped");
    // Its thread uses this agent until the process ends.
    static std::vector<std::shared_ptr<rpc::RpcAgent>> abandoned;
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    abandoned.push_back(rpc::RpcAgent::getCurrentRpcAgent());
  }
  cache_->close();
}

} // namespace torch_rpc_ext::agent
