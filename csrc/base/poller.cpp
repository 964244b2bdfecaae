#include "base/poller.h"

#include "base/boundary.h"
#include "base/timer.h"

#include <poll.h>
#include <sys/epoll.h>

#include <utility>

namespace torch_rpc_ext::base {

namespace {

constexpr uint64_t kWakeKey = 0;
// How often a waiter looks whether a guest has given the main descriptor back.
// A guest looks at isWanted() about once per microsecond, except while it
// handles input: then the waiter gives up, and does not lead.
constexpr int kLooksForGuest = 200;

// Takes about 0.1 us, so that another thread can get the mutex.
void relax() {
  for (int i = 0; i < 10; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

} // namespace

Poller::Poller()
    : epoll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {
  // Edge-triggered: each raise() wakes one thread, and no thread has to take().
  // If the descriptor were level-triggered, it would stay ready until the woken
  // thread has called take(), and meanwhile the kernel would wake further
  // threads in vain.
  control(EPOLL_CTL_ADD, wakeEvent_.fd(), kWakeKey, EPOLLIN | EPOLLET);
  timers_ = std::make_unique<TimerQueue>(*this);
}

Poller::~Poller() = default;

void Poller::control(int operation, int fd, uint64_t key, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  checked(epoll_ctl(epoll_.fd(), operation, fd, &event), "epoll_ctl");
}

void Poller::add(State& state, Entry entry) {
  const int fd = entry.fd;
  const uint64_t key = state.nextKey++;
  control(EPOLL_CTL_ADD, fd, key, EPOLLIN | EPOLLONESHOT);
  state.keys[fd] = key;
  state.entries[key] = std::make_shared<const Entry>(std::move(entry));
}

void Poller::add(int fd, Handler handler) {
  add(*state_.lock(), {fd, std::move(handler), {}});
}

void Poller::addMain(int fd, Handler handler, Look look) {
  auto state = state_.lock();
  add(*state, {fd, std::move(handler), std::move(look)});
  state->mainFd = fd;
}

void Poller::rearm(int fd) {
  const auto state = state_.lock();
  const auto it = state->keys.find(fd);
  if (it != state->keys.end() && !(fd == state->mainFd && state->led)) {
    control(EPOLL_CTL_MOD, fd, it->second, EPOLLIN | EPOLLONESHOT);
  }
}

void Poller::remove(int fd) {
  auto state = state_.lock();
  const auto it = state->keys.find(fd);
  if (it == state->keys.end()) {
    return;
  }
  if (fd == state->mainFd) {
    state->mainFd = -1;
  }
  epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr);
  state->entries.erase(it->second);
  state->keys.erase(it);
}

Poller::EntryPtr Poller::find(uint64_t key) {
  const auto state = state_.lock();
  const auto it = state->entries.find(key);
  return it == state->entries.end() ? nullptr : it->second;
}

Poller::Ended Poller::wait(int timeoutMs) {
  epoll_event event{};
  const int n = epoll_wait(epoll_.fd(), &event, 1, timeoutMs);
  if (n <= 0) {
    return Ended::kTimeout;
  }
  if (event.data.u64 == kWakeKey) {
    return Ended::kWake;
  }
  if (const auto entry = find(event.data.u64)) {
    // A handler that throws may not have reached its own rearm(). Without the
    // rearm() here, the descriptor would then stay disarmed for ever.
    guarded(Boundary::kEvent, entry->handler, [&](const Error&) {
      rearm(entry->fd);
    });
  }
  return Ended::kEvent;
}

void Poller::wake() {
  wakeEvent_.raise();
}

Poller::Lead::Lead(Poller& poller, std::shared_ptr<Signal> signal, As as)
    : poller_(poller), signal_(std::move(signal)) {
  bool guestHas = take(as);
  if (!guestHas || as == As::kGuest) {
    return;
  }
  poller_.wanted_.store(true);
  for (int i = 0; guestHas && i < kLooksForGuest; ++i) {
    relax();
    guestHas = take(as);
  }
  poller_.wanted_.store(false);
}

bool Poller::Lead::take(As as) {
  auto state = poller_.state_.lock();
  const auto it = state->keys.find(state->mainFd);
  if (state->led || it == state->keys.end()) {
    return state->led && state->ledByGuest;
  }
  poller_.control(EPOLL_CTL_MOD, state->mainFd, it->second, /*events=*/0);
  state->led = true;
  state->ledByGuest = as == As::kGuest;
  entry_ = state->entries.at(it->second);
  return false;
}

Poller::Ended Poller::Lead::wait(int timeoutMs) {
  pollfd fds[] = {{entry_->fd, POLLIN, 0}, {signal_->fd(), POLLIN, 0}};
  if (::poll(fds, 2, timeoutMs) <= 0) {
    return Ended::kTimeout;
  }
  if (fds[1].revents != 0) {
    signal_->take();
    return Ended::kWake;
  }
  // After an exception no rearm() is needed: ::poll() reports the input again.
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
  poller_.state_.lock()->led = false;
  // Input that arrived meanwhile and was not handled wakes another waiter now.
  poller_.rearm(entry_->fd);
  entry_.reset();
}

} // namespace torch_rpc_ext::base
