#include "transport/tcp/lane_set.h"

#include "base/boundary.h"
#include "base/short_time_slices.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace torch_rpc_ext::transport::tcp {

namespace {

// How often in a row one piece of work may throw. It is tried again, because no
// event would come for it.
constexpr int kMostFailures = 3;

int makeEpoll() {
  const int fd = ::epoll_create1(EPOLL_CLOEXEC);
  if (fd < 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_create1");
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

LaneSet::LaneSet(
    base::Poller& poller,
    base::TaskRunner& runner,
    std::shared_ptr<base::Gate> gate,
    Handle handle,
    Work work)
    : poller_(poller),
      runner_(runner),
      gate_(std::move(gate)),
      handle_(std::move(handle)),
      work_(std::move(work)),
      epollFd_(makeEpoll()) {}

std::shared_ptr<LaneSet> LaneSet::create(
    base::Poller& poller,
    base::TaskRunner& runner,
    std::shared_ptr<base::Gate> gate,
    Handle handle,
    Work work) {
  std::shared_ptr<LaneSet> set(new LaneSet(
      poller, runner, std::move(gate), std::move(handle), std::move(work)));
  // Not on the thread that polls: it would handle no other event meanwhile.
  poller.add(set->epollFd_, [weak = std::weak_ptr(set)] {
    if (const auto self = weak.lock()) {
      self->workSoon();
    }
  });
  return set;
}

LaneSet::~LaneSet() {
  ::close(epollFd_);
}

void LaneSet::add(Locked&, int fd, uint64_t id, uint32_t events) {
  control(epollFd_, EPOLL_CTL_ADD, fd, id, events);
}

void LaneSet::change(Locked&, int fd, uint64_t id, uint32_t events) {
  control(epollFd_, EPOLL_CTL_MOD, fd, id, events);
}

void LaneSet::remove(Locked&, int fd) {
  ::epoll_ctl(epollFd_, EPOLL_CTL_DEL, fd, nullptr);
}

void LaneSet::workSoon() {
  again_.store(true);
  if (!serving_.exchange(true)) {
    runner_.submit(
        base::makeTask([self = shared_from_this()] { self->serve(); }));
  }
}

// One thread serves at a time: two would only wait for each other's lock.
void LaneSet::serve() {
  const base::Gate::Inside inside(*gate_);
  base::ShortTimeSlices slices;
  do {
    while (again_.exchange(false)) {
      int failures = 0;
      for (bool more = true; more; slices.yield()) {
        base::guarded(
            base::Boundary::kBulkSocket,
            [&] {
              run([&](Locked& locked) {
                more = !stopped_ && serveOne(locked);
                failures = 0;
              });
            },
            [&](const base::Error&) { more = ++failures < kMostFailures; });
      }
    }
    {
      const Locked locked(*this);
      if (!stopped_) {
        poller_.rearm(epollFd_);
      }
    }
    serving_.store(false);
    // Work that came in between is this thread's, or that of a new task.
  } while (again_.load() && !serving_.exchange(true));
}

bool LaneSet::serveOne(Locked& locked) {
  if (work_(locked)) {
    return true;
  }
  epoll_event event{};
  if (::epoll_wait(epollFd_, &event, 1, /*timeout=*/0) != 1) {
    return false;
  }
  handle_(locked, event.data.u64, event.events);
  return true;
}

void LaneSet::stop(Locked&) {
  if (!std::exchange(stopped_, true)) {
    poller_.remove(epollFd_);
  }
}

} // namespace torch_rpc_ext::transport::tcp
