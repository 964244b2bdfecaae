// UcxAgent, what it tells about itself.

#include "agent/call_label.h"
#include "agent/ucx_agent.h"

#include <algorithm>

namespace torch_rpc_ext::agent {

namespace {

constexpr double kNanosecondsPerMicrosecond = 1000;

} // namespace

std::unordered_map<std::string, std::string> UcxAgent::getMetrics() {
  const auto cache = cache_->stats();
  const auto received = admission_.load();
  const size_t running = executor_.runningRequests();
  const size_t poolSize = executor_.requestThreads();
  std::unordered_map<std::string, std::string> metrics = {
      // upstream's keys
      {"agent.thread_pool_size", std::to_string(poolSize)},
      {"agent.num_idle_threads",
       std::to_string(poolSize - std::min(running, poolSize))},
      {"agent.client_active_calls",
       std::to_string(counters_.clientActiveCalls.load())},
      {"agent.server_active_calls",
       std::to_string(counters_.serverActiveCalls.load())},
      {"agent.server_active_async_calls",
       std::to_string(counters_.serverActiveAsyncCalls.load())},
      // ours
      {"agent.threads", std::to_string(executor_.threads())},
      {"agent.queued_requests", std::to_string(executor_.queuedRequests())},
      {"agent.receive_held_bytes", std::to_string(received.heldBytes)},
      {"agent.receive_waiting_requests",
       std::to_string(received.waitingRequests)},
      {"agent.receive_waiting_bytes", std::to_string(received.waitingBytes)},
      {"agent.queued_frame_bytes", std::to_string(queuedFrames_.bytes())},
      {"agent.pending_calls", std::to_string(pending_.size())},
      {"agent.peers", std::to_string(peers_.size())},
      {"agent.calls_held_back", std::to_string(load_.heldBack())},
      {"agent.calls_sent", std::to_string(counters_.callsSent.load())},
      {"agent.calls_served", std::to_string(counters_.callsServed.load())},
      {"agent.calls_not_begun", std::to_string(counters_.callsNotBegun.load())},
      {"agent.calls_failed", std::to_string(counters_.callsFailed.load())},
      {"agent.calls_timed_out", std::to_string(counters_.callsTimedOut.load())},
      {"agent.bytes_sent", std::to_string(counters_.bytesSent.load())},
      {"agent.bytes_received", std::to_string(counters_.bytesReceived.load())},
      {"agent.average_latency_us",
       std::to_string(
           counters_.latency.read().mean() / kNanosecondsPerMicrosecond)},
      {"agent.receive_cache_hits", std::to_string(cache.hits)},
      {"agent.receive_cache_misses", std::to_string(cache.misses)},
      {"agent.receive_cache_idle_bytes", std::to_string(cache.idleBytes)},
      {"agent.receive_cache_used_bytes", std::to_string(cache.usedBytes)},
  };
  const auto ipc = ipc_->stats();
  metrics["agent.cuda_ipc_sent_bytes"] = std::to_string(ipc.bytesSent);
  metrics["agent.cuda_ipc_received_bytes"] = std::to_string(ipc.bytesReceived);
  metrics["agent.cuda_ipc_held_messages"] = std::to_string(ipc.held);
  metrics["agent.cuda_ipc_open_allocations"] = std::to_string(ipc.open);
  if (isGILProfilingEnabled()) {
    metrics["agent.gil_average_wait_time_us"] = std::to_string(
        counters_.gilWait.read().mean() / kNanosecondsPerMicrosecond);
  }
  return metrics;
}

std::unordered_map<std::string, std::string> UcxAgent::getDebugInfo() {
  auto info = getMetrics();
  for (const auto& [name, path] : paths()) {
    info["agent.peer." + name + ".control"] = path.control;
    info["agent.peer." + name + ".bulk"] = path.bulk;
  }
  return info;
}

std::map<std::string, metrics::Distribution> UcxAgent::histograms() const {
  return {
      {"agent.latency", counters_.latency.read()},
      {"agent.queue", counters_.queue.read()},
      {"agent.execution", counters_.execution.read()},
      {"agent.gil_wait", counters_.gilWait.read()},
      {"agent.message_bytes", counters_.messageBytes.read()},
  };
}

std::map<std::string, Admission::Load> UcxAgent::waitingCallers() const {
  std::map<std::string, Admission::Load> waiting;
  for (const auto& [caller, load] : admission_.byCaller()) {
    if (load.waitingRequests != 0) {
      waiting[peers_.nameOf(caller)] = load;
    }
  }
  return waiting;
}

bool UcxAgent::isAlive(const std::string& worker) {
  const rpc::worker_id_t id = membership_.byName(worker).id_;
  if (id == workerInfo_.id_) {
    return true;
  }
  // From here on its death is noticed.
  peers_.connection(id);
  return !peers_.isLost(worker);
}

void UcxAgent::beginCallLog(size_t most) {
  gilProfiled_.store(isGILProfilingEnabled());
  enableGILProfiling(true);
  sentLog_.begin(most);
  servedLog_.begin(most);
}

UcxAgent::LoggedCalls UcxAgent::endCallLog() {
  if (sentLog_.on()) {
    enableGILProfiling(gilProfiled_.load());
  }
  return {sentLog_.end(), servedLog_.end()};
}

void UcxAgent::log(const PendingCall& call, bool failed) {
  if (!sentLog_.on()) {
    return;
  }
  sentLog_.add(
      {.id = call.id,
       .peer = call.worker,
       .label = call.label,
       .begin = toNanoseconds(call.sentAt),
       .end = toNanoseconds(PendingCall::Clock::now()),
       .failed = failed});
}

} // namespace torch_rpc_ext::agent
