#pragma once

#include "base/error.h"
#include "base/poller.h"
#include "base/task.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/ucp_context.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// A ucp_worker_h that many threads use without waiting for each other.
//
// post() runs an operation under the worker's lock: on the calling thread when
// the lock is free, else on the thread that holds it (flat combining), because
// handing a send to another thread costs more than the send. What an operation
// or a UCX callback must not do under the lock it passes to defer().
//
// Owns: the ucp_worker_h, its event descriptor, the queue of operations.
// Thread: create(), post(), progressSoon(), stop() any; the rest under the
//   lock.
// Outlives: every endpoint made from it.
class Worker {
 public:
  static base::Result<std::shared_ptr<Worker>> create(
      std::shared_ptr<UcpContext> context);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Begins to be progressed by the threads that wait on `poller`; `main`: also
  // by one that leads there.
  void start(base::Poller& poller, bool main);

  // Runs `operation` under the lock, now or soon. Also after stop(), when no
  // thread progresses any more: operations must look at what they belong to.
  void post(base::TaskPtr operation);

  // Under the lock: runs `task` as soon as the lock has been released.
  void defer(base::TaskPtr task) {
    deferred_.push_back(std::move(task));
  }

  // Under the lock: runs `operation` under the lock, but not inside the UCX
  // callback that is running now.
  void postAfter(base::TaskPtr operation);

  // Under the lock, and not inside a UCX callback: takes what has arrived.
  void progressAll();

  // Has one of the threads that wait on the poller progress. Any thread.
  void progressSoon() {
    ucp_worker_signal(worker_);
  }

  // Under the lock: a UCX request is in flight, somebody has to progress.
  void needProgress() {
    needProgress_ = true;
  }

  // Under the lock.
  ucp_worker_h get() const {
    return worker_;
  }

  WorkerAddress address() const;

  // Runs `operation` under the lock on this thread, blocking for the lock.
  template <typename F>
  void runLocked(F&& operation) {
    mutex_.lock();
    try {
      operation();
    } catch (...) {
      finish();
      throw;
    }
    finish();
  }

  // Progresses on this thread until `done` (called under the lock) or until
  // `milliseconds` have passed.
  template <typename F>
  bool progressUntil(F&& done, int milliseconds);

  // Detaches from the poller; later events are not served.
  void stop();

 private:
  Worker(std::shared_ptr<UcpContext> context, ucp_worker_h worker, int fd);

  void onEvent();
  void drainOperations();
  // Releases the lock and runs what was deferred; again while there is more.
  void finish();

  const std::shared_ptr<UcpContext> context_;
  ucp_worker_h worker_;
  const int eventFd_;
  base::Poller* poller_ = nullptr;

  std::mutex mutex_; // the lock
  std::vector<base::TaskPtr> deferred_;
  bool needProgress_ = false;
  std::atomic<bool> stopped_{false};

  std::mutex operationsMutex_;
  std::vector<base::TaskPtr> operations_;
  std::atomic<bool> hasOperations_{false};
};

int64_t monotonicMilliseconds();

template <typename F>
bool Worker::progressUntil(F&& done, int milliseconds) {
  const int64_t deadline = monotonicMilliseconds() + milliseconds;
  bool result = false;
  do {
    mutex_.lock();
    drainOperations();
    while (ucp_worker_progress(worker_) != 0) {
    }
    result = done();
    finish();
  } while (!result && monotonicMilliseconds() < deadline);
  return result;
}

} // namespace torch_rpc_ext::transport::ucx
