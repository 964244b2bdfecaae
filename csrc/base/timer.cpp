#include "base/timer.h"

#include "base/boundary.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace torch_rpc_ext::base {

namespace {

// A handler that threw is called again after this time.
constexpr std::chrono::milliseconds kAgain{100};

// The timer with the first moment, or end().
auto first(const std::map<Timer*, Timer::Clock::time_point>& moments) {
  return std::min_element(
      moments.begin(), moments.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      });
}

} // namespace

void Timer::set(Clock::time_point moment) {
  if (!stopped_.load()) { // after stop() the queue may be gone
    queue_.set(*this, moment);
  }
}

void Timer::stop() {
  if (!stopped_.exchange(true)) {
    queue_.set(*this, Clock::time_point::max());
  }
}

TimerQueue::TimerQueue(Poller& poller)
    : poller_(poller),
      descriptor_(checked(
          timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK),
          "timerfd_create")) {
  poller_.add(descriptor_.fd(), [this] { onReadable(); });
}

TimerQueue::~TimerQueue() {
  poller_.remove(descriptor_.fd());
}

void TimerQueue::set(Timer& timer, Clock::time_point moment) {
  auto state = state_.lock();
  // Another thread may have stopped the timer since Timer::set() looked.
  if (timer.stopped_.load() || moment == Clock::time_point::max()) {
    state->moments.erase(&timer);
  } else {
    state->moments.insert_or_assign(&timer, moment);
  }
  arm(*state);
}

void TimerQueue::arm(State& state) {
  const auto next = first(state.moments);
  if (next == state.moments.end() || next->second >= state.armed) {
    return;
  }
  state.armed = next->second;
  // steady_clock is CLOCK_MONOTONIC. At least 1 ns, because 0 would switch the
  // timer off.
  const auto ns = std::max<int64_t>(
      1,
      std::chrono::duration_cast<std::chrono::nanoseconds>(
          state.armed.time_since_epoch())
          .count());
  itimerspec spec{};
  spec.it_value.tv_sec = ns / 1'000'000'000;
  spec.it_value.tv_nsec = ns % 1'000'000'000;
  timerfd_settime(descriptor_.fd(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void TimerQueue::onReadable() {
  Timer* timer = nullptr;
  {
    auto state = state_.lock();
    uint64_t expirations = 0;
    (void)!read(descriptor_.fd(), &expirations, sizeof(expirations));
    state->armed = Clock::time_point::max();
    const auto next = first(state->moments);
    if (next != state->moments.end() && next->second <= Clock::now()) {
      timer = next->first;
      state->moments.erase(next);
    }
    arm(*state);
  }
  poller_.rearm(descriptor_.fd());
  if (timer != nullptr) {
    guarded(Boundary::kTimer, timer->handler_, [&](const Error&) {
      set(*timer, Clock::now() + kAgain);
    });
  }
}

} // namespace torch_rpc_ext::base
