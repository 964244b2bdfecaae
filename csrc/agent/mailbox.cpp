#include "agent/mailbox.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <utility>

namespace torch_rpc_ext::agent {

namespace {

// A signal may come while this thread is not asleep, and then ends no wait.
constexpr timespec kLongestSleep{1, 0};

} // namespace

bool Mailbox::put(base::TaskPtr& task) {
  {
    auto state = state_.lock();
    if (state->closed) {
      return false;
    }
    state->tasks.push_back(std::move(task));
  }
  ring();
  return true;
}

void Mailbox::ring() {
  static_assert(decltype(rung_)::is_always_lock_free);
  if (rung_.exchange(1) == 0) {
    syscall(SYS_futex, &rung_, FUTEX_WAKE_PRIVATE, 1);
  }
}

bool Mailbox::wait() {
  while (rung_.exchange(0) == 0) {
    // The time is one of the monotonic clock. EAGAIN: ring() came before.
    if (syscall(SYS_futex, &rung_, FUTEX_WAIT_PRIVATE, 0, &kLongestSleep) !=
            0 &&
        errno != EAGAIN) {
      return false;
    }
  }
  return true;
}

base::TaskPtr Mailbox::next() {
  auto state = state_.lock();
  if (state->tasks.empty()) {
    return nullptr;
  }
  base::TaskPtr task = std::move(state->tasks.front());
  state->tasks.pop_front();
  return task;
}

bool Mailbox::serve(const std::function<bool()>& done) {
  while (!done()) {
    if (base::TaskPtr task = next()) {
      task->run();
    } else if (!wait()) {
      return false;
    }
  }
  return true;
}

std::deque<base::TaskPtr> Mailbox::close() {
  auto state = state_.lock();
  state->closed = true;
  return std::exchange(state->tasks, {});
}

void Mailbox::open() {
  state_.lock()->closed = false;
}

} // namespace torch_rpc_ext::agent
