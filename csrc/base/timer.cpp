#include "base/timer.h"

#include "base/boundary.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

namespace torch_rpc_ext::base {

namespace {

// A handler that threw is called again after this time.
constexpr std::chrono::milliseconds kAgain{100};

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
      fd_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (fd_ < 0) {
    throw std::system_error(errno, std::generic_category(), "timerfd_create");
  }
  poller_.add(fd_, [this] { onReadable(); });
}

TimerQueue::~TimerQueue() {
  poller_.remove(fd_);
  close(fd_);
}

void TimerQueue::set(Timer& timer, Clock::time_point moment) {
  std::lock_guard lock(mutex_);
  // Another thread may have stopped the timer since set() looked.
  setLocked(timer, timer.stopped_.load() ? Clock::time_point::max() : moment);
  armLocked();
}

void TimerQueue::setLocked(Timer& timer, Clock::time_point moment) {
  due_.erase({timer.moment_, &timer});
  timer.moment_ = moment;
  if (moment != Clock::time_point::max()) {
    due_.emplace(moment, &timer);
  }
}

void TimerQueue::armLocked() {
  if (due_.empty() || due_.begin()->first >= armed_) {
    return;
  }
  armed_ = due_.begin()->first;
  // steady_clock is CLOCK_MONOTONIC. At least 1 ns, because 0 would switch the
  // timer off.
  const auto ns = std::max<int64_t>(
      1,
      std::chrono::duration_cast<std::chrono::nanoseconds>(
          armed_.time_since_epoch())
          .count());
  itimerspec spec{};
  spec.it_value.tv_sec = ns / 1'000'000'000;
  spec.it_value.tv_nsec = ns % 1'000'000'000;
  timerfd_settime(fd_, TFD_TIMER_ABSTIME, &spec, nullptr);
}

void TimerQueue::onReadable() {
  Timer* timer = nullptr;
  {
    std::lock_guard lock(mutex_);
    uint64_t expirations = 0;
    (void)!read(fd_, &expirations, sizeof(expirations));
    armed_ = Clock::time_point::max();
    if (!due_.empty() && due_.begin()->first <= Clock::now()) {
      timer = due_.begin()->second;
      setLocked(*timer, Clock::time_point::max());
    }
    armLocked();
  }
  poller_.rearm(fd_);
  if (timer != nullptr) {
    guarded(Boundary::kTimer, timer->handler_, [&](const Error&) {
      set(*timer, Clock::now() + kAgain);
    });
  }
}

} // namespace torch_rpc_ext::base
