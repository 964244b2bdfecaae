#pragma once

#include "metrics/histogram.h"

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
  std::atomic<uint64_t> callsNotBegun{0}; // whose callers had given up
  std::atomic<uint64_t> callsFailed{0};
  std::atomic<uint64_t> callsTimedOut{0};
  std::atomic<uint64_t> bytesSent{0};
  std::atomic<uint64_t> bytesReceived{0};

  // Of the calls that succeeded, from send() to the completed future.
  TimeHistogram latency;
  // Of the requests served: from being here, tensors and all, until a thread
  // takes it; from then until its answer is there.
  TimeHistogram queue;
  TimeHistogram execution;
  // Only while upstream's profiling of the GIL is on.
  TimeHistogram gilWait;
  // Of requests and answers sent.
  SizeHistogram messageBytes;
};

inline void add(std::atomic<uint64_t>& counter, uint64_t value) {
  counter.fetch_add(value, std::memory_order_relaxed);
}

} // namespace torch_rpc_ext::metrics
