#pragma once

#include <atomic>
#include <cstdint>

namespace torch_rpc_ext::metrics {

// What an agent counts all the time. Each counter is one relaxed addition.
struct Counters {
  std::atomic<int64_t> clientActiveCalls{0};
  std::atomic<int64_t> serverActiveCalls{0};
  std::atomic<int64_t> serverActiveAsyncCalls{0};

  std::atomic<uint64_t> callsSent{0};
  std::atomic<uint64_t> callsServed{0};
  std::atomic<uint64_t> callsFailed{0};
  std::atomic<uint64_t> callsTimedOut{0};
  std::atomic<uint64_t> bytesSent{0};
  std::atomic<uint64_t> bytesReceived{0};
  // Of the calls that succeeded, from send() to the completed future.
  std::atomic<uint64_t> latencyMicroseconds{0};
  std::atomic<uint64_t> latencyCalls{0};

  std::atomic<uint64_t> gilWaitMicroseconds{0};
  std::atomic<uint64_t> gilWaits{0};
};

inline void add(std::atomic<uint64_t>& counter, uint64_t value) {
  counter.fetch_add(value, std::memory_order_relaxed);
}

inline double average(
    const std::atomic<uint64_t>& sum,
    const std::atomic<uint64_t>& count) {
  const uint64_t n = count.load(std::memory_order_relaxed);
  return n == 0 ? 0
                : static_cast<double>(sum.load(std::memory_order_relaxed)) /
          static_cast<double>(n);
}

} // namespace torch_rpc_ext::metrics
