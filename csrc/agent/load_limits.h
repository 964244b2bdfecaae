#pragma once

#include "base/error.h"
#include "base/synchronized.h"

#include <torch/csrc/distributed/rpc/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <unordered_map>

namespace torch_rpc_ext::agent {

// Limits the calls that this worker may have under way to each other worker. A
// thread that wants to make more waits: a caller that is faster than its callee
// is slowed down and does not fill the callee's memory.
//
// Thread: any.
class LoadLimits {
 public:
  using Clock = std::chrono::steady_clock;
  using worker_id_t = torch::distributed::rpc::worker_id_t;

  // 0: no limit.
  LoadLimits(uint64_t maxCalls, uint64_t maxBytes);

  bool countsBytes() const {
    return maxBytes_ != 0;
  }

  // Waits until there is room for a call of `bytes` to `to`; a call with more
  // bytes than the limit waits until no other bytes are under way. Fails with
  // kOverloaded at the deadline, with kShutDown after stop(). Otherwise end()
  // has to follow. `checkInterrupt` is called every 100 ms during the wait, and
  // ends the wait by throwing.
  base::Error begin(
      worker_id_t to,
      uint64_t bytes,
      Clock::time_point deadline,
      const std::function<void()>& checkInterrupt);
  void end(worker_id_t to, uint64_t bytes);
  // Ends all waits, and refuses all calls from here on.
  void stop();
  // The error of each call after stop(); none before.
  base::Error stopped() const;

  // How many calls have had to wait so far.
  uint64_t heldBack() const;

 private:
  struct Load {
    uint64_t calls = 0;
    uint64_t bytes = 0;
  };
  struct State {
    std::unordered_map<worker_id_t, Load> loads;
    uint64_t heldBack = 0;
    size_t waiting = 0;
    bool stopped = false;
  };

  bool fits(const Load& load, uint64_t bytes) const;
  static base::Error stopped(const State& state);

  const uint64_t maxCalls_;
  const uint64_t maxBytes_;
  base::Synchronized<State> state_;
  std::condition_variable changed_;
};

} // namespace torch_rpc_ext::agent
