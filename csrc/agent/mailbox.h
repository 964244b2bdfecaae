#pragma once

#include "base/synchronized.h"
#include "base/task.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>

namespace torch_rpc_ext::agent {

// Tasks for one thread that waits for an answer while another thread leads
// (Executor::Leader). The thread that takes the answer from the network puts
// here what is left to do with it, so that the waiting thread itself, and not a
// third thread of the pool, does it. Closed at first.
//
// Thread: any; serve() is for the thread that waits.
class Mailbox {
 public:
  // Takes `task`, which serve() then runs. Returns false while the mailbox is
  // closed; then the task stays with the caller.
  bool put(base::TaskPtr& task);
  // Wakes serve(), which then asks `done` again.
  void ring();

  // Runs the tasks that are put, until `done`. Returns false after an operating
  // system signal, and after a second without a task, because a signal may have
  // gone unnoticed.
  bool serve(const std::function<bool()>& done);
  void open();
  // Takes no tasks until open(). Returns those that were put and have not run.
  std::deque<base::TaskPtr> close();

 private:
  struct State {
    std::deque<base::TaskPtr> tasks;
    bool closed = true;
  };

  base::TaskPtr next();
  // Waits for ring(). Returns false after a signal, and after a second.
  bool wait();

  base::Synchronized<State> state_;
  // 1 after ring(), until wait() has seen it. A futex, because a signal does
  // not end the wait for a condition variable, and the wait for a semaphore
  // goes by the wall clock before glibc 2.30.
  std::atomic<uint32_t> rung_{0};
};

} // namespace torch_rpc_ext::agent
