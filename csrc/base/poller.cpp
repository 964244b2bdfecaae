#include "base/poller.h"

#include "base/boundary.h"
#include "base/timer.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace torch_rpc_ext::base {

namespace {

constexpr uint64_t kWakeKey = 0;
// How often a waiter looks whether a guest has given the main descriptor back.
// A guest looks at isWanted() about once per microsecond, unless it is handling
// input, for which the waiter does not wait.
constexpr int kLooksForGuest = 200;

// About 0.1 us, in which another thread may take the mutex.
void relax() {
  for (int i = 0; i < 10; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

int checked(int result, const char* what) {
  if (result < 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
  return result;
}

} // namespace

Poller::Poller()
    : epollFd_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wakeFd_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  epoll_event event{};
  // Edge-triggered: each write wakes one thread, and no thread has to read. If
  // the descriptor were level-triggered, it would stay ready until the woken
  // thread has read it, and meanwhile the kernel would wake further threads in
  // vain.
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kWakeKey;
  checked(epoll_ctl(epollFd_, EPOLL_CTL_ADD, wakeFd_, &event), "epoll_ctl");
  timers_ = std::make_unique<TimerQueue>(*this);
}

Poller::~Poller() {
  timers_.reset(); // first: its destructor calls remove()
  close(wakeFd_);
  close(epollFd_);
}

void Poller::control(int operation, int fd, uint64_t key, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  checked(epoll_ctl(epollFd_, operation, fd, &event), "epoll_ctl");
}

void Poller::add(int fd, Handler handler) {
  std::lock_guard lock(mutex_);
  const uint64_t key = nextKey_++;
  control(EPOLL_CTL_ADD, fd, key, EPOLLIN | EPOLLONESHOT);
  keys_[fd] = key;
  entries_[key] = std::make_shared<Entry>(Entry{fd, std::move(handler), {}});
}

void Poller::addMain(int fd, Handler handler, Look look) {
  add(fd, std::move(handler));
  std::lock_guard lock(mutex_);
  entries_.at(keys_.at(fd))->look = std::move(look);
  mainFd_ = fd;
}

void Poller::rearm(int fd) {
  std::lock_guard lock(mutex_);
  auto it = keys_.find(fd);
  if (it != keys_.end() && !(fd == mainFd_ && led_)) {
    control(EPOLL_CTL_MOD, fd, it->second, EPOLLIN | EPOLLONESHOT);
  }
}

void Poller::remove(int fd) {
  std::lock_guard lock(mutex_);
  auto it = keys_.find(fd);
  if (it == keys_.end()) {
    return;
  }
  if (fd == mainFd_) {
    mainFd_ = -1;
  }
  epoll_ctl(epollFd_, EPOLL_CTL_DEL, fd, nullptr);
  entries_.erase(it->second);
  keys_.erase(it);
}

std::shared_ptr<Poller::Entry> Poller::find(uint64_t key) {
  std::lock_guard lock(mutex_);
  auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : it->second;
}

Poller::Ended Poller::wait(int timeoutMs) {
  epoll_event event{};
  const int n = epoll_wait(epollFd_, &event, 1, timeoutMs);
  if (n <= 0) {
    return Ended::kTimeout;
  }
  if (event.data.u64 == kWakeKey) {
    return Ended::kWake;
  }
  if (auto entry = find(event.data.u64)) {
    // A handler that throws may not have reached its rearm(): without this one,
    // the descriptor would stay disarmed for ever.
    guarded(Boundary::kEvent, entry->handler, [&](const Error&) {
      rearm(entry->fd);
    });
  }
  return Ended::kEvent;
}

void Poller::wake() {
  const uint64_t one = 1;
  (void)!write(wakeFd_, &one, sizeof(one));
}

Poller::Lead::Signal::Signal()
    : fd_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {}

Poller::Lead::Signal::~Signal() {
  close(fd_);
}

void Poller::Lead::Signal::raise() {
  const uint64_t one = 1;
  (void)!write(fd_, &one, sizeof(one));
}

Poller::Lead::Lead(Poller& poller, std::shared_ptr<Signal> signal, As as)
    : poller_(poller), signal_(std::move(signal)) {
  std::unique_lock lock(poller_.mutex_);
  if (as == As::kWaiter && poller_.led_ && poller_.ledByGuest_) {
    poller_.wanted_.store(true);
    for (int i = 0; i < kLooksForGuest && poller_.led_; ++i) {
      lock.unlock();
      relax();
      lock.lock();
    }
    poller_.wanted_.store(false);
  }
  auto it = poller_.keys_.find(poller_.mainFd_);
  if (poller_.led_ || it == poller_.keys_.end()) {
    return;
  }
  poller_.control(EPOLL_CTL_MOD, poller_.mainFd_, it->second, /*events=*/0);
  poller_.led_ = true;
  poller_.ledByGuest_ = as == As::kGuest;
  entry_ = poller_.entries_.at(it->second);
}

Poller::Ended Poller::Lead::wait(int timeoutMs) {
  pollfd fds[] = {{entry_->fd, POLLIN, 0}, {signal_->fd_, POLLIN, 0}};
  if (::poll(fds, 2, timeoutMs) <= 0) {
    return Ended::kTimeout;
  }
  if (fds[1].revents != 0) {
    uint64_t count = 0;
    (void)!read(signal_->fd_, &count, sizeof(count));
    return Ended::kWake;
  }
  // No rearm() after an exception: poll() reports the input again.
  guarded(Boundary::kEvent, entry_->handler);
  return Ended::kEvent;
}

bool Poller::Lead::poll() {
  bool any = false;
  guarded(
      Boundary::kEvent,
      [&] { any = entry_->look(); },
      [&](const Error&) { any = true; });
  return any;
}

void Poller::Lead::give() {
  if (entry_ == nullptr) {
    return;
  }
  {
    std::lock_guard lock(poller_.mutex_);
    poller_.led_ = false;
  }
  // Input that arrived meanwhile and was not handled wakes another waiter now.
  poller_.rearm(entry_->fd);
  entry_.reset();
}

} // namespace torch_rpc_ext::base
