#include "base/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace torch_rpc_ext::base {

namespace {

constexpr uint64_t kWakeKey = 0;

int checked(int result, const char* what) {
  if (result < 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
  return result;
}

} // namespace

Poller::Poller()
    : epollFd_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wakeFd_(checked(
          eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE),
          "eventfd")) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeKey;
  checked(epoll_ctl(epollFd_, EPOLL_CTL_ADD, wakeFd_, &event), "epoll_ctl");
}

Poller::~Poller() {
  close(wakeFd_);
  close(epollFd_);
}

void Poller::add(int fd, Handler handler) {
  std::lock_guard lock(mutex_);
  const uint64_t key = nextKey_++;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.u64 = key;
  checked(epoll_ctl(epollFd_, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
  keys_[fd] = key;
  entries_[key] = std::make_shared<Entry>(Entry{fd, std::move(handler)});
}

void Poller::rearm(int fd) {
  std::lock_guard lock(mutex_);
  auto it = keys_.find(fd);
  if (it == keys_.end()) {
    return;
  }
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.u64 = it->second;
  epoll_ctl(epollFd_, EPOLL_CTL_MOD, fd, &event);
}

void Poller::remove(int fd) {
  std::lock_guard lock(mutex_);
  auto it = keys_.find(fd);
  if (it == keys_.end()) {
    return;
  }
  epoll_ctl(epollFd_, EPOLL_CTL_DEL, fd, nullptr);
  entries_.erase(it->second);
  keys_.erase(it);
}

Poller::Ended Poller::wait(int timeoutMs) {
  epoll_event event{};
  const int n = epoll_wait(epollFd_, &event, 1, timeoutMs);
  if (n <= 0) {
    return Ended::kTimeout;
  }
  if (event.data.u64 == kWakeKey) {
    // A semaphore: each reader takes one wake. Another thread may have been
    // quicker; then this one has simply looked around.
    uint64_t one = 0;
    (void)!read(wakeFd_, &one, sizeof(one));
    return Ended::kWake;
  }
  std::shared_ptr<Entry> entry;
  {
    std::lock_guard lock(mutex_);
    auto it = entries_.find(event.data.u64);
    if (it == entries_.end()) {
      return Ended::kEvent;
    }
    entry = it->second;
  }
  entry->handler();
  return Ended::kEvent;
}

void Poller::wake(uint64_t count) {
  (void)!write(wakeFd_, &count, sizeof(count));
}

} // namespace torch_rpc_ext::base
