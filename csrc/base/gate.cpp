#include "base/gate.h"

namespace torch_rpc_ext::base {

namespace {

constexpr uint64_t kClosed = UINT64_MAX;

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
  uint64_t inside = inside_.load(std::memory_order_relaxed);
  do {
    if (inside == kClosed) {
      return false;
    }
  } while (!inside_.compare_exchange_weak(inside, inside + 1));
  return true;
}

void Gate::leave() {
  uint64_t inside = inside_.load(std::memory_order_relaxed);
  while (inside != kClosed) {
    if (inside_.compare_exchange_weak(inside, inside - 1)) {
      return;
    }
  }
  auto state = state_.lock();
  --state->inside;
  // Before the unlock, because the thread in wait() may destroy the gate as
  // soon as it sees that no other thread is inside.
  changed_.notify_all();
}

void Gate::close() {
  auto state = state_.lock();
  if (!state->closed) {
    *state = {.closed = true, .inside = inside_.exchange(kClosed)};
  }
  changed_.notify_all();
}

void Gate::wait() {
  const uint64_t own = entriesOfThisThread();
  auto state = state_.lock();
  state.wait(changed_, [&] { return state->closed && state->inside == own; });
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
