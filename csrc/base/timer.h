#pragma once

#include "base/poller.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <set>
#include <utility>

namespace torch_rpc_ext::base {

// One moment at which a handler runs, on a thread that waits on a Poller.
//
// Owns: its place in the Poller's TimerQueue.
// Thread: any.
// Outlives: the Poller, once stopped.
class Timer {
 public:
  using Clock = std::chrono::steady_clock;

  Timer(Poller& poller, std::function<void()> handler)
      : queue_(poller.timers()), handler_(std::move(handler)) {}
  ~Timer() {
    stop();
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Takes the place of the moment before; one in the past is now, max() never.
  void set(Clock::time_point moment);
  // The handler does not start after this returns, unless it had begun.
  void stop();

 private:
  friend class TimerQueue;

  TimerQueue& queue_;
  const std::function<void()> handler_;
  Clock::time_point moment_ = Clock::time_point::max(); // the queue's
  std::atomic<bool> stopped_{false};
};

// All timers of a Poller: a descriptor of each would be five for each process.
// A handler that takes long does not delay the other timers: the thread that
// takes a due timer from the queue first leaves the descriptor to the next
// thread, and then runs the handler.
//
// Owns: a timer descriptor.
// Thread: any.
// Outlives: every Timer that is not stopped.
class TimerQueue {
 public:
  using Clock = Timer::Clock;

  explicit TimerQueue(Poller& poller);
  ~TimerQueue();
  TimerQueue(const TimerQueue&) = delete;
  TimerQueue& operator=(const TimerQueue&) = delete;

  void set(Timer& timer, Clock::time_point moment);

 private:
  void onReadable();
  void setLocked(Timer& timer, Clock::time_point moment);
  void armLocked();

  Poller& poller_;
  const int fd_;
  std::mutex mutex_;
  std::set<std::pair<Clock::time_point, Timer*>> due_;
  // When the descriptor becomes readable. May be too early: a timer that is set
  // for later, as most are, again and again, then costs no system call.
  Clock::time_point armed_ = Clock::time_point::max();
};

} // namespace torch_rpc_ext::base
