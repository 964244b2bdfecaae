#pragma once

#include "agent/allow_list.h"
#include "agent/wire_dtype.h"
#include "transport/ucx/options.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent {

// Faults that tests inject into outgoing messages, chosen by the name of the
// message type (nameOf() in call_label.h). Empty in production.
struct FaultOptions {
  std::vector<std::string> messagesToFail;
  std::vector<std::string> messagesToLose; // the connection breaks, too
  std::vector<std::string> messagesToCorrupt; // one bit is flipped
  // The bulk claims to be memory that the receiver has lent out.
  std::vector<std::string> messagesToForge;
  std::unordered_map<std::string, double> messagesToDelay; // seconds
  // How often in a row each such message suffers its fault. A delay comes with
  // every attempt.
  int failures = 0;

  bool any() const {
    return !messagesToFail.empty() || !messagesToLose.empty() ||
        !messagesToCorrupt.empty() || !messagesToForge.empty() ||
        !messagesToDelay.empty();
  }
};

// A hundred years. A time that is added to a time point must be shorter than
// 292 years, because the clocks count nanoseconds in 64 bits.
constexpr float kLongestSeconds = 3.15e9F;

// Upstream's options and calls give times in seconds. Times of more than a
// hundred years, such as infinity, become a hundred years.
inline std::chrono::milliseconds toMilliseconds(float seconds) {
  return std::chrono::milliseconds(
      static_cast<int64_t>(std::min(seconds, kLongestSeconds) * 1000));
}

// Validated in Python (torch_rpc_ext/options.py), where users build them.
struct AgentOptions {
  int numWorkerThreads = 16;
  float rpcTimeoutSeconds = 60;
  uint64_t receiveCacheBytes = uint64_t{4} << 30;
  float receiveCacheIdleSeconds = 30;
  // Memory for the bulk of requests that no thread serves yet; 0 for no limit.
  // A single caller has its own limit as well (admission.h).
  uint64_t receiveBudgetBytes = 0;
  // Limits of the calls under way to any one worker; 0 for no limit.
  uint64_t maxCallsInFlight = 0;
  uint64_t maxBytesInFlight = 0;
  bool useCudaIpc = true;
  bool busyPoll = true; // threads may poll before they sleep (base/busy_poll.h)
  WireDtypes wireDtypes; // as which dtype float32 tensors travel
  // Whether checksums travel with all that this worker sends.
  bool integrity = false;
  transport::ucx::Options transport;
  AllowList allowed;
  FaultOptions faults;
};

// Calls `take(name, member)` for each option that Python hands over unchanged;
// `name` is the name in torch_rpc_ext/options.py.
template <typename F>
void forEachOption(AgentOptions& options, F&& take) {
  take("num_worker_threads", options.numWorkerThreads);
  take("rpc_timeout", options.rpcTimeoutSeconds);
  take("receive_cache_bytes", options.receiveCacheBytes);
  take("receive_cache_idle", options.receiveCacheIdleSeconds);
  take("receive_budget", options.receiveBudgetBytes);
  take("max_calls_in_flight", options.maxCallsInFlight);
  take("max_bytes_in_flight", options.maxBytesInFlight);
  take("use_cuda_ipc", options.useCudaIpc);
  take("busy_poll", options.busyPoll);
  take("integrity", options.integrity);
  take("port_range", options.transport.ports);
  take("use_cma", options.transport.useCma);
  take("use_shared_memory", options.transport.useSharedMemory);
  take("keepalive", options.transport.keepaliveSeconds);
  take("max_message_bytes", options.transport.maxFrameBytes);
  take("messages_to_fail", options.faults.messagesToFail);
  take("messages_to_lose", options.faults.messagesToLose);
  take("messages_to_corrupt", options.faults.messagesToCorrupt);
  take("messages_to_forge", options.faults.messagesToForge);
  take("messages_to_delay", options.faults.messagesToDelay);
  take("num_fail_sends", options.faults.failures);
}

} // namespace torch_rpc_ext::agent
