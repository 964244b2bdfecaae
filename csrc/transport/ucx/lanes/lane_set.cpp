#include "transport/ucx/lanes/lane_set.h"

#include "base/short_time_slices.h"

#include <utility>

namespace torch_rpc_ext::transport::ucx::lanes {

namespace {

// After so many exceptions in a row the thread waits for the next event. Until
// then it tries again, because no event would come for the work that threw.
constexpr int kMostFailures = 3;

constexpr uint64_t kWakeId = 0; // of wakeEvent_; sockets have others

void control(int epoll, int operation, int fd, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  base::checked(::epoll_ctl(epoll, operation, fd, &event), "epoll_ctl");
}

} // namespace

LaneSet::LaneSet(std::shared_ptr<base::Gate> gate, Handle handle, Work work)
    : gate_(std::move(gate)),
      handle_(std::move(handle)),
      work_(std::move(work)),
      epoll_(base::checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {
  control(epoll_.fd(), EPOLL_CTL_ADD, wakeEvent_.fd(), kWakeId, EPOLLIN);
}

base::Error LaneSet::add(Locked&, int fd, uint64_t id, uint32_t events) {
  try {
    if (!thread_.joinable() && !stopped_) {
      thread_ = std::thread([self = shared_from_this()] { self->serve(); });
    }
    control(epoll_.fd(), EPOLL_CTL_ADD, fd, id, events); // last: see the header
    return {};
  } catch (...) {
    return base::caught();
  }
}

void LaneSet::change(Locked&, int fd, uint64_t id, uint32_t events) {
  control(epoll_.fd(), EPOLL_CTL_MOD, fd, id, events);
}

void LaneSet::remove(Locked&, int fd) {
  ::epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr);
}

void LaneSet::workSoon() {
  if (!wakes_.exchange(true)) {
    wakeEvent_.raise();
  }
}

void LaneSet::serve() {
  base::ShortTimeSlices slices;
  bool stopped = false;
  while (!stopped) {
    // This only waits: serveOne() takes the event again, and handles it.
    epoll_event event{};
    ::epoll_wait(epoll_.fd(), &event, 1, /*timeout=*/-1);
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
  if (::epoll_wait(epoll_.fd(), &event, 1, /*timeout=*/0) != 1) {
    return false;
  }
  if (event.data.u64 == kWakeId) {
    wakeEvent_.take();
    // From now on workSoon() raises a new event. Work that was there before is
    // seen by the next call of work_.
    wakes_.store(false);
  } else {
    handle_(locked, event.data.u64, event.events);
  }
  return true;
}

void LaneSet::stop(Locked&) {
  stopped_ = true;
  wakeEvent_.raise();
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
