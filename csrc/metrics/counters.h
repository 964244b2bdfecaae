#pragma once

#include "metrics/histogram.h"

#include <atomic>
#include <cstdint>

namespace torch_rpc_ext::metrics {

// What an agent always counts. To count is one relaxed addition.
struct Counters {
  std::atomic<int64_t> clientActiveCalls{0};
  std::atomic<int64_t> serverActiveCalls{0};
  std::atomic<int64_t> serverActiveAsyncCalls{0};

  std::atomic<uint64_t> callsSent{0};
  std::atomic<uint64_t> callsServed{0};
  // Requests that were not begun, because their callers had given up or because
  // too many requests waited.
  std::atomic<uint64_t> callsNotBegun{0};
  std::atomic<uint64_t> callsFailed{0};
  std::atomic<uint64_t> callsTimedOut{0};
  std::atomic<uint64_t> bytesSent{0};
  std::atomic<uint64_t> bytesReceived{0};

  // Calls that succeeded: from send() until the future is completed.
  TimeHistogram latency;
  // Served requests: from when the request and all its tensors have arrived
  // until a thread takes the request.
  TimeHistogram queue;
  // Served requests: from when a thread takes the request until its answer is
  // ready.
  TimeHistogram execution;
  // Only while upstream's profiling of the GIL is on.
  TimeHistogram gilWait;
  // Requests and answers that were sent.
  SizeHistogram messageBytes;
};

inline void add(std::atomic<uint64_t>& counter, uint64_t value) {
  counter.fetch_add(value, std::memory_order_relaxed);
}

} // namespace torch_rpc_ext::metrics
