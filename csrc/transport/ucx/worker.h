#pragma once

#include "base/boundary.h"
#include "base/error.h"
#include "base/gate.h"
#include "base/poller.h"
#include "base/task.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/ucp_context.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// Which of the two workers of a context. The locks of the two have tokens of
// different types: what needs one cannot be called with the other.
enum class WorkerRole : uint8_t { kControl, kBulk };

// A ucp_worker_h that many threads use without waiting for each other.
//
// post() runs an operation under the worker's lock: on the calling thread when
// the lock is free, else on the thread that holds it (flat combining), because
// handing a send to another thread costs more than the send. What an operation
// or a UCX callback must not do while the lock is held it passes to defer().
//
// Owns: the ucp_worker_h, its event descriptor, the queue of operations.
// Thread: any.
// Outlives: every endpoint made from it.
template <WorkerRole role>
class Worker {
  class Operation;
  template <typename F>
  class OperationOf;

 public:
  // The token: whoever is given a reference to it holds the worker's lock until
  // it returns. Only Worker makes tokens, and what needs the lock takes one as
  // its first parameter. UCX's callbacks get it in from_ucx.h.
  // Thread: the one that it was given to.
  class Locked {
   public:
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

    ucp_worker_h get() const {
      return worker_.worker_;
    }

    // Runs `task`, a void(), as soon as the lock has been released.
    template <typename F>
    void defer(F&& task) {
      worker_.deferred_.push_back(base::makeTask(std::forward<F>(task)));
    }

    // Runs `operation`, a void(Locked&), before the lock is released, but not
    // inside of the UCX callback that is running now.
    template <typename F>
    void postAfter(F&& operation) {
      worker_.enqueue(
          std::make_unique<OperationOf<F>>(std::forward<F>(operation)));
    }

    // Not inside of a UCX callback: takes what has arrived.
    void progressAll();

    // A UCX request is in flight, somebody has to progress.
    void needProgress() {
      worker_.needProgress_ = true;
    }

   private:
    friend class Worker;

    explicit Locked(Worker& worker) : worker_(worker) {
      worker_.held_ = this;
    }
    ~Locked() {
      worker_.held_ = nullptr;
    }

    Worker& worker_;
  };

  // `gate` is entered around what runs for the poller, and around what was
  // deferred.
  static base::Result<std::shared_ptr<Worker>> create(
      std::shared_ptr<UcpContext> context,
      std::shared_ptr<base::Gate> gate);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Begins to be progressed by the threads that wait on `poller`; `main`: also
  // by one that leads there.
  void start(base::Poller& poller, bool main);

  // Runs `operation`, a void(Locked&), now or soon. Also after stop(), when no
  // thread progresses any more: operations must look at what they belong to.
  template <typename F>
  void post(F&& operation);

  // Runs `operation`, a void(Locked&), on this thread; blocks until the lock is
  // free.
  template <typename F>
  void runLocked(F&& operation);

  // Progresses on this thread until `done`, a bool(Locked&), or until
  // `milliseconds` have passed.
  template <typename F>
  void progressUntil(F&& done, int milliseconds);

  // Has one of the threads that wait on the poller progress.
  void progressSoon() {
    ucp_worker_signal(worker_);
  }

  WorkerAddress address() const;

  // Detaches from the poller: no thread progresses any more, unless somebody
  // calls progressUntil() or progressAll(). Not from an operation.
  void stop();

 private:
  template <base::Boundary, auto, auto>
  friend class FromUcx;

  // Like base::Task, for what is called with the token.
  class Operation {
   public:
    virtual ~Operation() = default;
    virtual void run(Locked& locked) = 0;
  };
  template <typename F>
  class OperationOf final : public Operation {
   public:
    explicit OperationOf(F&& function) : function_(std::forward<F>(function)) {}
    void run(Locked& locked) override {
      function_(locked);
    }

   private:
    std::decay_t<F> function_;
  };

  Worker(
      std::shared_ptr<UcpContext> context,
      std::shared_ptr<base::Gate> gate,
      ucp_worker_h worker,
      int fd);

  // The token of the thread that is inside of UCX: for UCX's callbacks.
  Locked& held();
  void onEvent();
  void enqueue(std::unique_ptr<Operation> operation);
  void drainOperations(Locked& locked);
  // Releases the lock and runs what was deferred; again while there is more.
  void finish();

  const std::shared_ptr<UcpContext> context_;
  const std::shared_ptr<base::Gate> gate_;
  ucp_worker_h worker_;
  const int eventFd_;
  base::Poller* poller_ = nullptr;

  std::mutex mutex_; // the lock
  Locked* held_ = nullptr;
  std::vector<base::TaskPtr> deferred_;
  bool needProgress_ = false;
  std::atomic<bool> stopped_{false};

  std::mutex operationsMutex_;
  std::vector<std::unique_ptr<Operation>> operations_;
  std::atomic<bool> hasOperations_{false};
};

using ControlWorker = Worker<WorkerRole::kControl>;
using BulkWorker = Worker<WorkerRole::kBulk>;
// The lock of all connections, and that of the BulkChannel.
using Locked = ControlWorker::Locked;
using BulkLocked = BulkWorker::Locked;

int64_t monotonicMilliseconds();

template <WorkerRole role>
template <typename F>
void Worker<role>::post(F&& operation) {
  if (mutex_.try_lock()) {
    {
      Locked locked(*this);
      // What throws must not leave the worker locked.
      base::caughtHere(base::Boundary::kOperation, [&] { operation(locked); });
    }
    finish();
    return;
  }
  enqueue(std::make_unique<OperationOf<F>>(std::forward<F>(operation)));
  // The holder looks at the queue after it has released the lock. If it has
  // already looked, the lock is free now and the queue is ours to drain.
  if (mutex_.try_lock()) {
    finish();
  }
}

template <WorkerRole role>
template <typename F>
void Worker<role>::runLocked(F&& operation) {
  mutex_.lock();
  try {
    Locked locked(*this);
    operation(locked);
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

template <WorkerRole role>
template <typename F>
void Worker<role>::progressUntil(F&& done, int milliseconds) {
  const int64_t deadline = monotonicMilliseconds() + milliseconds;
  bool over = false;
  do {
    mutex_.lock();
    {
      Locked locked(*this);
      drainOperations(locked);
      while (ucp_worker_progress(worker_) != 0) {
      }
      over = done(locked);
    }
    finish();
  } while (!over && monotonicMilliseconds() < deadline);
}

} // namespace torch_rpc_ext::transport::ucx
