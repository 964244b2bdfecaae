#include "base/gate.h"

namespace torch_rpc_ext::base {

namespace {

constexpr uint64_t kClosed = 1;
constexpr uint64_t kOne = 2;

// The newest Inside on this thread's stack, of any gate.
thread_local const Gate::Inside* innermost = nullptr;

} // namespace

Gate::Inside::Inside(Gate& gate)
    : gate_(gate), counted_(gate.enter()), outer_(innermost) {
  innermost = this;
}

Gate::Inside::~Inside() {
  innermost = outer_;
  if (counted_) {
    gate_.leave();
  }
}

bool Gate::enter() {
  uint64_t state = state_.load(std::memory_order_relaxed);
  do {
    if ((state & kClosed) != 0) {
      return false;
    }
  } while (!state_.compare_exchange_weak(state, state + kOne));
  return true;
}

void Gate::leave() {
  uint64_t state = state_.load(std::memory_order_relaxed);
  while ((state & kClosed) == 0) {
    if (state_.compare_exchange_weak(state, state - kOne)) {
      return;
    }
  }
  // Under the mutex, because the thread in wait() may destroy the gate as soon
  // as it sees that no other thread is inside.
  const std::lock_guard lock(mutex_);
  state_.fetch_sub(kOne);
  changed_.notify_all();
}

void Gate::close() {
  const std::lock_guard lock(mutex_);
  state_.fetch_or(kClosed);
  changed_.notify_all();
}

void Gate::wait() {
  const uint64_t last = entriesOfThisThread() * kOne + kClosed;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return state_.load() == last; });
}

uint64_t Gate::entriesOfThisThread() const {
  uint64_t entries = 0;
  for (const Inside* inside = innermost; inside != nullptr;
       inside = inside->outer_) {
    entries += &inside->gate_ == this && inside->counted_ ? 1 : 0;
  }
  return entries;
}

} // namespace torch_rpc_ext::base
