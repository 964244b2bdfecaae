#pragma once

#include "base/descriptor.h"
#include "base/poller.h"
#include "base/synchronized.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <utility>

namespace torch_rpc_ext::base {

// Runs a handler at a given moment, on a thread that waits on the Poller.
//
// Owns: its place in the Poller's TimerQueue.
// Thread: any.
// Outlives: a Timer may outlive the Poller, but only if it was stopped before.
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

  // Replaces the moment that was set before. A moment in the past means at
  // once, max() means never.
  void set(Clock::time_point moment);
  // No later moment starts the handler. But a thread that took this timer from
  // the queue just before may still run the handler after this returns, so the
  // timer must live until the Poller's threads have ended.
  void stop();

 private:
  friend class TimerQueue;

  TimerQueue& queue_;
  const std::function<void()> handler_;
  std::atomic<bool> stopped_{false};
};

// All timers of a Poller, on one timer descriptor: a process would need several
// descriptors if each Timer had its own. A handler that takes long does not
// delay the other timers: a thread takes a due timer from the queue, rearms the
// descriptor for the other threads, and only then runs the handler.
//
// Owns: the timer descriptor.
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
  struct State {
    // When the timers are due that are set. To look through all of them costs
    // little: a Poller has fewer than ten.
    std::map<Timer*, Clock::time_point> moments;
    // When the descriptor becomes readable. This may be before the first
    // moment: moving a timer to a later moment, which is what mostly happens,
    // does not rearm the descriptor and so costs no system call.
    Clock::time_point armed = Clock::time_point::max();
  };

  void onReadable();
  void arm(State& state);

  Poller& poller_;
  const Descriptor descriptor_;
  Synchronized<State> state_;
};

} // namespace torch_rpc_ext::base
