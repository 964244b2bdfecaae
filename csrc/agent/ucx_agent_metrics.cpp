// UcxAgent, what it tells about itself.

#include "agent/ucx_agent.h"

namespace torch_rpc_ext::agent {

std::unordered_map<std::string, std::string> UcxAgent::getMetrics() {
  const auto cache = cache_->stats();
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
      {"agent.pending_calls", std::to_string(pending_.size())},
      {"agent.peers", std::to_string(peers_.size())},
      {"agent.calls_held_back", std::to_string(load_.heldBack())},
      {"agent.calls_sent", std::to_string(counters_.callsSent.load())},
      {"agent.calls_served", std::to_string(counters_.callsServed.load())},
      {"agent.calls_failed", std::to_string(counters_.callsFailed.load())},
      {"agent.calls_timed_out", std::to_string(counters_.callsTimedOut.load())},
      {"agent.bytes_sent", std::to_string(counters_.bytesSent.load())},
      {"agent.bytes_received", std::to_string(counters_.bytesReceived.load())},
      {"agent.average_latency_us",
       std::to_string(
           metrics::average(
               counters_.latencyMicroseconds, counters_.latencyCalls))},
      {"agent.receive_cache_hits", std::to_string(cache.hits)},
      {"agent.receive_cache_misses", std::to_string(cache.misses)},
      {"agent.receive_cache_idle_bytes", std::to_string(cache.idleBytes)},
      {"agent.receive_cache_used_bytes", std::to_string(cache.usedBytes)},
  };
  if (isGILProfilingEnabled()) {
    metrics["agent.gil_average_wait_time_us"] = std::to_string(
        metrics::average(counters_.gilWaitMicroseconds, counters_.gilWaits));
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

void UcxAgent::addGilWaitTime(std::chrono::microseconds wait) {
  metrics::add(counters_.gilWaitMicroseconds, wait.count());
  metrics::add(counters_.gilWaits, 1);
}

} // namespace torch_rpc_ext::agent
