#include "agent/device/event_waiter.h"

#include "base/boundary.h"

#include <c10/util/Exception.h>

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

namespace torch_rpc_ext::agent::device {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// How long the thread sleeps before it asks the devices again: 1/kShare of the
// time for which it has asked in vain, within these two limits. So an event
// that waits alone is noticed late by no more than that share of its time.
constexpr int kShare = 8;
constexpr microseconds kShortestPause{10};
// A pause is also this much longer for each event that waits, because to ask
// for an event takes about a microsecond.
constexpr microseconds kPauseForEach{4};
constexpr microseconds kLongestPause{500};
constexpr std::chrono::seconds kStopTime{1};
// About the time that it takes to wake another thread.
constexpr microseconds kSoon{50};

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
    auto state = state_.lock();
    if (!state->stopped) {
      state->added.push_back({std::move(events), std::move(done)});
      if (!state->thread.joinable()) {
        state->thread = std::thread([this] { main(); });
      }
      changed_.notify_one();
      return;
    }
  }
  done(stoppedError());
}

bool EventWaiter::completeSoon(const Events& events) {
  const auto end = Clock::now() + kSoon;
  for (;;) {
    if (const auto result = outcome(events)) {
      return !*result;
    }
    if (Clock::now() > end) {
      return false;
    }
  }
}

void EventWaiter::main() {
  // By default, Linux may end each sleep 50 us late.
  ::prctl(PR_SET_TIMERSLACK, /*nanoseconds=*/1000UL, 0UL, 0UL, 0UL);
  List waiting;
  auto since = Clock::now(); // when an event was added or completed last
  Clock::time_point end = Clock::time_point::max();
  while (true) {
    auto state = state_.lock();
    if (waiting.empty()) {
      state.wait(
          changed_, [&] { return state->stopped || !state->added.empty(); });
    } else {
      const Clock::duration share = (Clock::now() - since) / kShare;
      const auto pause = std::min<Clock::duration>(
          std::max<Clock::duration>(share, kShortestPause) +
              kPauseForEach * (waiting.size() - 1),
          kLongestPause);
      state.waitFor(changed_, pause, [&] { return !state->added.empty(); });
    }
    if (!state->added.empty()) {
      waiting.splice(waiting.end(), state->added);
      since = Clock::now();
    }
    if (state->stopped && end == Clock::time_point::max()) {
      end = Clock::now() + kStopTime;
    }
    const bool last = state->stopped && (waiting.empty() || Clock::now() > end);
    state.unlock();
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
      since = Clock::now();
    }
    if (last) {
      return;
    }
  }
}

void EventWaiter::stop() {
  std::thread thread;
  {
    auto state = state_.lock();
    state->stopped = true;
    thread.swap(state->thread);
    changed_.notify_one();
  }
  if (thread.joinable()) {
    thread.join();
  }
}

} // namespace torch_rpc_ext::agent::device
