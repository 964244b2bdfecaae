#pragma once

#include "base/boundary.h"
#include "base/timer.h"
#include "transport/ucx/worker.h"

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

// Notices objects that take too long. All objects have the same time, counted
// from add().
//
// Owns: one timer, and weak references to the objects.
// Thread: any.
// Outlives: nothing; the poller and the worker outlive it.
template <typename T>
class Deadlines {
 public:
  using Clock = base::Timer::Clock;
  // Runs for each object that still exists when its time is over.
  using Expired = std::function<void(Locked&, const std::shared_ptr<T>&)>;

  Deadlines(
      base::Poller& poller,
      ControlWorker& worker,
      Clock::duration time,
      Expired expired)
      : time_(time),
        expired_(std::move(expired)),
        timer_(poller, [this, &worker] {
          worker.post([this](Locked& locked) { expire(locked); });
        }) {}

  void add(Locked&, const std::shared_ptr<T>& object) {
    waiting_.emplace_back(Clock::now() + time_, object);
    if (waiting_.size() == 1) {
      timer_.set(waiting_.front().first);
    }
  }
  void stop() {
    timer_.stop();
  }

 private:
  void expire(Locked& locked) {
    const auto now = Clock::now();
    while (!waiting_.empty() && waiting_.front().first <= now) {
      const auto object = waiting_.front().second.lock();
      waiting_.pop_front();
      if (object != nullptr) {
        // Each by itself, so that the others do not lose their timer.
        base::caughtHere(
            base::Boundary::kOperation, [&] { expired_(locked, object); });
      }
    }
    if (!waiting_.empty()) {
      timer_.set(waiting_.front().first);
    }
  }

  const Clock::duration time_;
  const Expired expired_;
  // Sorted by deadline, the earliest first.
  std::deque<std::pair<Clock::time_point, std::weak_ptr<T>>> waiting_;
  base::Timer timer_;
};

} // namespace torch_rpc_ext::transport::ucx
