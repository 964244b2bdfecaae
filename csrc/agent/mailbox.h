#pragma once

#include "base/task.h"

#include <semaphore.h>

#include <deque>
#include <functional>
#include <mutex>

namespace torch_rpc_ext::agent {

// Tasks for one thread that waits for an answer while another thread leads
// (Executor::Leader). The thread that takes the answer from the network puts
// here what is left to do with it, so that the waiting thread itself, and not a
// third thread of the pool, does it.
//
// Thread: any; serve() is for the thread that waits.
class Mailbox {
 public:
  Mailbox();
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Takes `task`, which serve() then runs. Returns false after close(); then
  // the task stays with the caller.
  bool put(base::TaskPtr& task);
  // Wakes serve(), which then asks `done` again.
  void ring();

  // Runs the tasks that are put, until `done`. Returns false after an operating
  // system signal, and after a second without a task, because a signal may have
  // gone unnoticed. To be called once.
  bool serve(const std::function<bool()>& done);
  // Takes no more tasks. Returns those that were put and have not run.
  std::deque<base::TaskPtr> close();

 private:
  base::TaskPtr next();

  std::mutex mutex_;
  std::deque<base::TaskPtr> tasks_;
  bool closed_ = false;
  sem_t rung_; // not a condition variable: a signal of the system ends its wait
};

} // namespace torch_rpc_ext::agent
