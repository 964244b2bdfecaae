#pragma once

#include "base/poller.h"

#include <atomic>
#include <chrono>
#include <functional>

namespace torch_rpc_ext::base {

// One moment at which a handler runs, on a thread that waits on a Poller.
//
// Owns: a timer descriptor.
// Thread: any; the owner serialises set() and stop().
// Outlives: the Poller, once stopped.
class Timer {
 public:
  using Clock = std::chrono::steady_clock;

  Timer(Poller& poller, std::function<void()> handler);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Takes the place of the moment before; one in the past is now, max() never.
  void set(Clock::time_point moment);
  // The handler does not start after this returns, unless it had begun.
  void stop();

 private:
  void onReadable();

  Poller& poller_;
  const std::function<void()> handler_;
  const int fd_;
  std::atomic<bool> stopped_{false};
};

} // namespace torch_rpc_ext::base
