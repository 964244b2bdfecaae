#include "agent/mailbox.h"

#include <ctime>
#include <utility>

namespace torch_rpc_ext::agent {

namespace {

// A signal may come while this thread is not asleep, and then ends no wait.
constexpr time_t kLookSeconds = 1;

timespec soon() {
  timespec time{};
  clock_gettime(CLOCK_REALTIME, &time);
  time.tv_sec += kLookSeconds;
  return time;
}

} // namespace

Mailbox::Mailbox() {
  sem_init(&rung_, /*pshared=*/0, /*value=*/0);
}

Mailbox::~Mailbox() {
  sem_destroy(&rung_);
}

bool Mailbox::put(base::TaskPtr& task) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) {
      return false;
    }
    tasks_.push_back(std::move(task));
  }
  ring();
  return true;
}

void Mailbox::ring() {
  sem_post(&rung_);
}

base::TaskPtr Mailbox::next() {
  std::lock_guard lock(mutex_);
  if (tasks_.empty()) {
    return nullptr;
  }
  base::TaskPtr task = std::move(tasks_.front());
  tasks_.pop_front();
  return task;
}

bool Mailbox::serve(const std::function<bool()>& done) {
  while (!done()) {
    if (base::TaskPtr task = next()) {
      task->run();
      continue;
    }
    const timespec until = soon();
    if (sem_timedwait(&rung_, &until) != 0) {
      return false;
    }
  }
  return true;
}

std::deque<base::TaskPtr> Mailbox::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  return std::exchange(tasks_, {});
}

} // namespace torch_rpc_ext::agent
