#pragma once

#include "base/boundary.h"
#include "base/error.h"
#include "base/gate.h"
#include "base/poller.h"
#include "base/synchronized.h"
#include "base/task.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/ucp_context.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// Names the two workers of a context. The locks of the two workers have tokens
// of different types, so a function that needs one lock cannot be called with
// the token of the other.
enum class WorkerRole : uint8_t { kControl, kBulk };

// A ucp_worker_h that many threads use without waiting for each other.
//
// post() runs an operation under the worker's lock. If the lock is free, the
// calling thread runs the operation; otherwise the thread that holds the lock
// does (flat combining), because handing a send to a pool thread costs more
// than the send. If an operation or a UCX callback has work that must not be
// done under the lock, it passes this work to defer().
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
  // The token that says that this thread holds the worker's lock: a function
  // that is given a reference to the token has the lock until the function
  // returns. Only Worker makes tokens, and each function that needs the lock
  // takes a token as its first parameter. Callbacks from UCX get the token in
  // from_ucx.h.
  // Thread: the thread that the token was given to.
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

    // Runs `operation`, a void(Locked&), before the lock is released, but after
    // the UCX callback that is running now has returned.
    template <typename F>
    void postAfter(F&& operation) {
      worker_.enqueue(
          std::make_unique<OperationOf<F>>(std::forward<F>(operation)));
    }

    // Lets UCX take what has arrived, up to a limit, because peers may send as
    // fast as this thread receives. Not to be called inside of a UCX callback.
    void progressAll();

    // To be called when a UCX request is in flight: some thread has to progress
    // the worker until the request has ended.
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

  // Each thread enters `gate` while it handles an event of the poller, and
  // while it runs deferred tasks.
  static base::Result<std::shared_ptr<Worker>> create(
      std::shared_ptr<UcpContext> context,
      std::shared_ptr<base::Gate> gate);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const std::shared_ptr<UcpContext>& context() const {
    return context_;
  }

  // From now on the threads that wait on `poller` progress this worker. With
  // `main`, so does a thread that leads there (Poller::Lead).
  void start(base::Poller& poller, bool main);

  // Runs `operation`, a void(Locked&), now or soon. Also runs it after stop(),
  // when no thread progresses the worker any more: so an operation must check
  // the state of the object that it works on.
  template <typename F>
  void post(F&& operation);

  // Runs `operation`, a void(Locked&), on this thread; blocks until the lock is
  // free.
  template <typename F>
  void runLocked(F&& operation);

  // Progresses on this thread until `done`, a bool(Locked&), returns true, or
  // for `time` at most.
  template <typename F>
  void progressUntil(F&& done, std::chrono::milliseconds time);

  // Makes one of the threads that wait on the poller progress the worker.
  void progressSoon() {
    ucp_worker_signal(worker_);
  }

  WorkerAddress address() const;

  // Detaches the worker from the poller: from now on no thread progresses it,
  // except by progressUntil() or progressAll(). Not to be called from an
  // operation.
  void stop();

 private:
  template <base::Boundary, auto, auto>
  friend class FromUcx;

  // Like base::Task, but run() is called with the token.
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

  // The token of the thread that is inside of UCX, for UCX's callbacks.
  Locked& held();
  void onEvent();
  // Progresses if the lock is free. Returns whether there was anything to do.
  bool look();
  // Takes what has arrived, and makes UCX raise an event for what comes next.
  // If very much has arrived, takes a part of it and wakes a thread for the
  // rest. The caller has locked mutex_; this releases it. `progressed`: the
  // caller has already taken something. Returns false if nothing has arrived
  // and UCX can still only be polled, because a peer's queue is full.
  bool takeAll(bool progressed);
  // After so many calls of ucp_worker_progress() that found something, a thread
  // hands on what has arrived: the first frames of a burst need not wait until
  // the last have arrived.
  static constexpr int kMostCalls = 64;
  // Lets UCX take what has arrived, in `most` calls at most, because peers may
  // send as fast as this thread receives. Returns how many calls found
  // something.
  int progress(Locked&, int most);
  void enqueue(std::unique_ptr<Operation> operation);
  void drainOperations(Locked& locked);
  // Releases the lock and runs the deferred tasks; repeats this while there are
  // more operations.
  void finish();

  const std::shared_ptr<UcpContext> context_;
  const std::shared_ptr<base::Gate> gate_;
  ucp_worker_h worker_;
  const int eventFd_;
  base::Poller* poller_ = nullptr;

  std::mutex mutex_; // the worker's lock
  Locked* held_ = nullptr;
  std::vector<base::TaskPtr> deferred_;
  bool needProgress_ = false;
  std::atomic<bool> stopped_{false};

  base::Synchronized<std::vector<std::unique_ptr<Operation>>> operations_;
  std::atomic<bool> hasOperations_{false};
};

using ControlWorker = Worker<WorkerRole::kControl>;
using BulkWorker = Worker<WorkerRole::kBulk>;
// The tokens of two locks: that of all connections, and that of the
// bulk::UcxChannel.
using Locked = ControlWorker::Locked;
using BulkLocked = BulkWorker::Locked;

template <WorkerRole role>
template <typename F>
void Worker<role>::post(F&& operation) {
  if (mutex_.try_lock()) {
    {
      Locked locked(*this);
      // An operation that throws must not leave the worker locked.
      base::caughtHere(base::Boundary::kOperation, [&] { operation(locked); });
    }
    finish();
    return;
  }
  enqueue(std::make_unique<OperationOf<F>>(std::forward<F>(operation)));
  // The thread that held the lock looks at the queue after it has released the
  // lock. If that thread has already looked, the lock is free now, and this
  // thread has to drain the queue.
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
void Worker<role>::progressUntil(F&& done, std::chrono::milliseconds time) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  bool over = false;
  do {
    runLocked([&](Locked& locked) {
      drainOperations(locked);
      progress(locked, kMostCalls);
      over = done(locked);
    });
  } while (!over && std::chrono::steady_clock::now() < deadline);
}

} // namespace torch_rpc_ext::transport::ucx
