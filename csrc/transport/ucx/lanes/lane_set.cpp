#include "transport/ucx/lanes/lane_set.h"

#include "base/boundary.h"
#include "base/short_time_slices.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace torch_rpc_ext::transport::ucx::lanes {

namespace {

// How often in a row one piece of work may throw. It is tried again, because no
// event would come for it.
constexpr int kMostFailures = 3;

constexpr uint64_t kWakeId = 0; // of the eventfd; sockets have others

int makeEpoll() {
  const int fd = ::epoll_create1(EPOLL_CLOEXEC);
  if (fd < 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_create1");
  }
  return fd;
}

int makeEvent() {
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  return fd;
}

void control(int epoll, int operation, int fd, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll, operation, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
}

} // namespace

LaneSet::LaneSet(std::shared_ptr<base::Gate> gate, Handle handle, Work work)
    : gate_(std::move(gate)),
      handle_(std::move(handle)),
      work_(std::move(work)),
      epollFd_(makeEpoll()),
      wakeFd_(makeEvent()) {
  control(epollFd_, EPOLL_CTL_ADD, wakeFd_, kWakeId, EPOLLIN);
}

LaneSet::~LaneSet() {
  ::close(epollFd_);
  ::close(wakeFd_);
}

void LaneSet::add(Locked&, int fd, uint64_t id, uint32_t events) {
  control(epollFd_, EPOLL_CTL_ADD, fd, id, events);
  if (!thread_.joinable() && !stopped_) {
    thread_ = std::thread([self = shared_from_this()] { self->serve(); });
  }
}

void LaneSet::change(Locked&, int fd, uint64_t id, uint32_t events) {
  control(epollFd_, EPOLL_CTL_MOD, fd, id, events);
}

void LaneSet::remove(Locked&, int fd) {
  ::epoll_ctl(epollFd_, EPOLL_CTL_DEL, fd, nullptr);
}

void LaneSet::workSoon() {
  if (!wakes_.exchange(true)) {
    wake();
  }
}

void LaneSet::wake() {
  const uint64_t one = 1;
  (void)!::write(wakeFd_, &one, sizeof(one));
}

void LaneSet::serve() {
  base::ShortTimeSlices slices;
  bool stopped = false;
  while (!stopped) {
    // The event stays, and is handled by serveOne().
    epoll_event event{};
    ::epoll_wait(epollFd_, &event, 1, /*timeout=*/-1);
    const base::Gate::Inside inside(*gate_);
    int failures = 0;
    for (bool more = true; more; slices.yield()) {
      base::guarded(
          base::Boundary::kBulkSocket,
          [&] {
            run([&](Locked& locked) {
              stopped = stopped_;
              more = !stopped_ && serveOne(locked);
              failures = 0;
            });
          },
          [&](const base::Error&) { more = ++failures < kMostFailures; });
    }
  }
}

bool LaneSet::serveOne(Locked& locked) {
  if (work_(locked)) {
    return true;
  }
  epoll_event event{};
  if (::epoll_wait(epollFd_, &event, 1, /*timeout=*/0) != 1) {
    return false;
  }
  if (event.data.u64 == kWakeId) {
    uint64_t count = 0;
    (void)!::read(wakeFd_, &count, sizeof(count));
    // From now on there is a new event for new work, and the next call sees the
    // work that came before.
    wakes_.store(false);
  } else {
    handle_(locked, event.data.u64, event.events);
  }
  return true;
}

void LaneSet::stop(Locked&) {
  stopped_ = true;
  wake();
}

void LaneSet::join() {
  if (!thread_.joinable()) {
    return;
  }
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

} // namespace torch_rpc_ext::transport::ucx::lanes
