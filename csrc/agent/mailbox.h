#pragma once

#include "base/task.h"

#include <semaphore.h>

#include <deque>
#include <functional>
#include <mutex>

namespace torch_rpc_ext::agent {

// Tasks for one thread that waits for an answer while another thread leads
// (Executor::Leader): who takes the answer from the network leaves here what
// is to be done with it, so that it crosses one thread and not a third of the
// pool.
//
// Thread: any; serve() is for the one that waits.
class Mailbox {
 public:
  Mailbox();
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Takes `task`, which serve() then runs. False, and the task stays with the
  // caller, once nobody serves any more.
  bool put(base::TaskPtr& task);
  // Makes serve() ask whether it is done.
  void ring();

  // Runs what is put, until `done`; false after a signal of the system, and
  // after a second, in which one may have gone unseen. To be called once.
  bool serve(const std::function<bool()>& done);
  // Nothing is taken from here on. Returns what was put and has not run.
  std::deque<base::TaskPtr> close();

 private:
  base::TaskPtr next();

  std::mutex mutex_;
  std::deque<base::TaskPtr> tasks_;
  bool closed_ = false;
  sem_t rung_; // not a condition variable: a signal of the system ends its wait
};

} // namespace torch_rpc_ext::agent
