#include "agent/device/event_waiter.h"

#include "base/boundary.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

namespace torch_rpc_ext::agent::device {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr microseconds kFirstPause{10};
constexpr microseconds kLongestPause{500};
constexpr std::chrono::seconds kStopTime{1};

base::Error stoppedError() {
  return {
      base::ErrorKind::kShutDown,
      "this worker shut down before a tensor had left its device"};
}

// std::nullopt while an event is not complete; then success, or the error that
// the device reports.
std::optional<base::Error> outcome(const Events& events) {
  try {
    for (const c10::Event& event : events) {
      if (!event.query()) {
        return std::nullopt;
      }
    }
    return base::Error();
  } catch (const c10::Error& error) {
    return base::Error(
        base::ErrorKind::kSystem, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return base::Error(base::ErrorKind::kSystem, error.what());
  }
}

} // namespace

EventWaiter::~EventWaiter() {
  stop();
}

void EventWaiter::whenComplete(Events events, Done done) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      added_.push_back({std::move(events), std::move(done)});
      if (!thread_.joinable()) {
        thread_ = std::thread([this] { main(); });
      }
      changed_.notify_one();
      return;
    }
  }
  done(stoppedError());
}

void EventWaiter::main() {
  List waiting;
  microseconds pause = kFirstPause;
  Clock::time_point end = Clock::time_point::max();
  std::unique_lock lock(mutex_);
  while (true) {
    if (waiting.empty()) {
      changed_.wait(lock, [this] { return stopped_ || !added_.empty(); });
    } else {
      changed_.wait_for(lock, pause, [this] { return !added_.empty(); });
      pause = std::min(pause * 2, kLongestPause);
    }
    if (!added_.empty()) {
      waiting.splice(waiting.end(), added_);
      pause = kFirstPause;
    }
    if (stopped_ && end == Clock::time_point::max()) {
      end = Clock::now() + kStopTime;
    }
    const bool last = stopped_ && (waiting.empty() || Clock::now() > end);
    lock.unlock();
    for (auto it = waiting.begin(); it != waiting.end();) {
      auto result = outcome(it->events);
      if (!result && last) {
        result = stoppedError();
      }
      if (!result) {
        ++it;
        continue;
      }
      Waiting done = std::move(*it);
      it = waiting.erase(it);
      done.events.clear();
      base::guarded(
          base::Boundary::kDeviceEvent,
          [&] { done.done(*result); },
          [&](const base::Error& thrown) { done.done(thrown); });
      pause = kFirstPause;
    }
    if (last) {
      return;
    }
    lock.lock();
  }
}

void EventWaiter::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

} // namespace torch_rpc_ext::agent::device
