#include "base/timer.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

namespace torch_rpc_ext::base {

Timer::Timer(Poller& poller, std::function<void()> handler)
    : poller_(poller),
      handler_(std::move(handler)),
      fd_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (fd_ < 0) {
    throw std::system_error(errno, std::generic_category(), "timerfd_create");
  }
  poller_.add(fd_, [this] { onReadable(); });
}

Timer::~Timer() {
  stop();
  close(fd_);
}

void Timer::set(Clock::time_point moment) {
  itimerspec spec{};
  if (moment != Clock::time_point::max()) {
    // steady_clock is CLOCK_MONOTONIC; all zero would switch the timer off.
    const auto ns = std::max<int64_t>(
        1,
        std::chrono::duration_cast<std::chrono::nanoseconds>(
            moment.time_since_epoch())
            .count());
    spec.it_value.tv_sec = ns / 1'000'000'000;
    spec.it_value.tv_nsec = ns % 1'000'000'000;
  }
  timerfd_settime(fd_, TFD_TIMER_ABSTIME, &spec, nullptr);
}

void Timer::onReadable() {
  uint64_t expirations = 0;
  (void)!read(fd_, &expirations, sizeof(expirations));
  poller_.rearm(fd_);
  handler_();
}

void Timer::stop() {
  if (!stopped_.exchange(true)) {
    poller_.remove(fd_);
  }
}

} // namespace torch_rpc_ext::base
