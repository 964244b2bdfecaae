#include "agent/agent_metrics.h"

#include <algorithm>
#include <cstddef>

namespace torch_rpc_ext::agent {

namespace {

constexpr double kNanosecondsPerMicrosecond = 1000;

} // namespace

void addMetrics(const metrics::Counters& counters, Metrics& metrics) {
  const auto add = [&metrics](const std::string& name, const auto& counter) {
    metrics["agent." + name] = std::to_string(counter.load());
  };
  // upstream's keys
  add("client_active_calls", counters.clientActiveCalls);
  add("server_active_calls", counters.serverActiveCalls);
  add("server_active_async_calls", counters.serverActiveAsyncCalls);
  // ours
  add("calls_sent", counters.callsSent);
  add("calls_served", counters.callsServed);
  add("calls_not_begun", counters.callsNotBegun);
  add("calls_failed", counters.callsFailed);
  add("calls_timed_out", counters.callsTimedOut);
  add("bytes_sent", counters.bytesSent);
  add("bytes_received", counters.bytesReceived);
  metrics["agent.average_latency_us"] = std::to_string(
      counters.latency.read().mean() / kNanosecondsPerMicrosecond);
}

void addGilMetrics(const metrics::Counters& counters, Metrics& metrics) {
  metrics["agent.gil_average_wait_time_us"] = std::to_string(
      counters.gilWait.read().mean() / kNanosecondsPerMicrosecond);
}

void addMetrics(const Executor& executor, Metrics& metrics) {
  const size_t running = executor.runningRequests();
  const size_t poolSize = executor.requestThreads();
  // upstream's keys
  metrics["agent.thread_pool_size"] = std::to_string(poolSize);
  metrics["agent.num_idle_threads"] =
      std::to_string(poolSize - std::min(running, poolSize));
  // ours
  metrics["agent.threads"] = std::to_string(executor.threads());
  metrics["agent.queued_requests"] = std::to_string(executor.queuedRequests());
  const base::BusyPoll::Stats polls = executor.busyPolls();
  metrics["agent.busy_polls_found"] = std::to_string(polls.found);
  metrics["agent.busy_polls_missed"] = std::to_string(polls.missed);
  metrics["agent.busy_polls_missed_us"] = std::to_string(
      static_cast<double>(polls.missedNanoseconds) /
      kNanosecondsPerMicrosecond);
}

std::map<std::string, metrics::Distribution> histogramsOf(
    const metrics::Counters& counters) {
  return {
      {"agent.latency", counters.latency.read()},
      {"agent.queue", counters.queue.read()},
      {"agent.execution", counters.execution.read()},
      {"agent.gil_wait", counters.gilWait.read()},
      {"agent.message_bytes", counters.messageBytes.read()},
  };
}

} // namespace torch_rpc_ext::agent
