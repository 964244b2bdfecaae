#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::metrics {

// One call as its caller or its callee has seen it. Times in ns of the
// monotonic clock, which is that of Python's time.perf_counter_ns().
struct LoggedCall {
  uint64_t id = 0; // the caller's number for it
  std::string peer; // name of the callee, or of the caller
  std::string label; // what was asked for
  int64_t begin = 0; // caller: send(); callee: the request is here
  int64_t start = 0; // callee: a thread takes it
  int64_t end = 0; // caller: it has failed, or its answer is here; callee: done
  int64_t gilWait = 0; // callee: ns spent waiting for the GIL
  uint64_t bytes = 0; // of the answer, at the callee
  bool failed = false; // at the caller
};

// Calls one by one, while somebody profiles; nothing at other times.
// Thread: any.
class CallLog {
 public:
  // Forgets what there was and keeps up to `most` from now on.
  void begin(size_t most) {
    std::lock_guard lock(mutex_);
    calls_.clear();
    most_ = most;
    on_.store(true, std::memory_order_relaxed);
  }

  bool on() const {
    return on_.load(std::memory_order_relaxed);
  }

  void add(LoggedCall call) {
    std::lock_guard lock(mutex_);
    if (on() && calls_.size() < most_) {
      calls_.push_back(std::move(call));
    }
  }

  std::vector<LoggedCall> end() {
    std::lock_guard lock(mutex_);
    on_.store(false, std::memory_order_relaxed);
    return std::exchange(calls_, {});
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<LoggedCall> calls_;
  size_t most_ = 0;
};

} // namespace torch_rpc_ext::metrics
