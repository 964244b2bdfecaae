#pragma once

#include "base/synchronized.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::metrics {

// One call as either its caller or its callee has seen it. Times are in ns of
// the monotonic clock, which is also that of Python's time.perf_counter_ns().
struct LoggedCall {
  uint64_t id = 0; // the caller's number of the call
  std::string peer; // name of the callee, or at the callee that of the caller
  std::string label; // the function or operator that is called
  int64_t begin = 0; // caller: send(); callee: the request has arrived
  int64_t start = 0; // callee only: a thread takes the request
  int64_t end = 0; // caller: the call is answered or failed; callee: it is done
  int64_t gilWait = 0; // callee only: ns spent waiting for the GIL
  uint64_t bytes = 0; // callee only: of the answer
  bool failed = false; // caller only
};

// Records each call while a profiler is on, and nothing at other times.
// Thread: any.
class CallLog {
 public:
  // Drops the calls recorded so far, and records up to `most` from now on.
  void begin(size_t most) {
    auto state = state_.lock();
    state->calls.clear();
    state->most = most;
    on_.store(true, std::memory_order_relaxed);
  }

  bool on() const {
    return on_.load(std::memory_order_relaxed);
  }

  void add(LoggedCall call) {
    auto state = state_.lock();
    if (on() && state->calls.size() < state->most) {
      state->calls.push_back(std::move(call));
    }
  }

  // Stops recording and returns the calls.
  std::vector<LoggedCall> end() {
    auto state = state_.lock();
    on_.store(false, std::memory_order_relaxed);
    return std::exchange(state->calls, {});
  }

 private:
  struct State {
    std::vector<LoggedCall> calls;
    size_t most = 0;
  };

  std::atomic<bool> on_{false};
  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::metrics
