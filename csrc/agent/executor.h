#pragma once

#include "base/poller.h"
#include "base/task.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace torch_rpc_ext::agent {

// The threads of an agent: leader/follower. All idle threads wait on one
// Poller; the one that an event wakes runs the transport and then, itself, the
// first piece of work that came out of it, so that a call costs no hand-off.
//
// Three kinds of work:
//  - internal tasks (copies, decoding): never block on a peer;
//  - completions of futures: run user callbacks, which may block;
//  - requests: run user functions; at most `requestThreads` at a time.
// Nothing waits behind blocked user code: before a thread leaves the Poller for
// user code it makes sure that another one stays, starting it if need be, and a
// request that waits for a nested call of its own does not count as running.
//
// Owns: its threads, the Poller, the queues.
// Thread: any.
// Outlives: the transport and everything that submits.
class Executor final : public base::TaskRunner {
 public:
  // One running request, as seen by the calls it makes.
  class RequestScope;
  using RequestScopePtr = std::shared_ptr<RequestScope>;

  // One queued task and what it may do.
  enum class Kind { kInternal, kCompletion, kRequest };
  struct Work {
    base::TaskPtr task;
    Kind kind = Kind::kInternal;
  };

  explicit Executor(size_t requestThreads);
  ~Executor() override;

  base::Poller& poller() {
    return poller_;
  }

  // Lives on each thread from its start to its end; made there. Set it before
  // start().
  using ThreadScope = std::function<std::shared_ptr<void>()>;
  void setThreadScope(ThreadScope scope) {
    threadScope_ = std::move(scope);
  }
  // Runs on a thread of the pool after each task: what user code has changed
  // there must not reach the next task. Set it before start().
  void setAfterTask(std::function<void()> afterTask) {
    afterTask_ = std::move(afterTask);
  }
  void start();
  // Runs what is queued (requests excepted, they are dropped) and joins the
  // threads. False when some were still in user code after `milliseconds`: then
  // this object must be kept for ever.
  bool stop(int milliseconds);

  void submit(base::TaskPtr task) override; // internal
  void submitCompletion(base::TaskPtr task);
  void submitRequest(base::TaskPtr task);

  // The request that this thread runs now, or null. The scope tells the
  // executor that the request waits: from beginNested() to endNested().
  RequestScopePtr currentRequest();
  void beginNested(const RequestScopePtr& scope);
  void endNested(const RequestScopePtr& scope);

  // On any thread that waits for an answer: it serves the transport in place of
  // the pool, so that the answer needs no hand-off. Others have a Mailbox.
  class Leader;
  // True on a thread that is in Leader::wait().
  bool leads() const;
  // While it lives on such a thread, the first task that the thread submits is
  // run by the thread itself.
  class Claim;

  // Called now and then, at most once a minute, while requests have been
  // waiting for a thread for a second and more: (how many wait, for how long).
  void setFullHook(std::function<void(size_t waiting, double seconds)> hook) {
    fullHook_ = std::move(hook);
  }

  size_t requestThreads() const {
    return requestThreads_;
  }
  // Requests that run now, and that wait for a thread.
  size_t runningRequests() const;
  size_t queuedRequests() const;
  size_t threads() const;

 private:
  using Signal = base::Poller::Lead::Signal;

  void threadMain();
  bool comesBack();
  void endThread(std::shared_ptr<void> scope);
  void enqueue(Work work);
  Work takeWork(bool joins);
  void wakeOne();
  void run(Work work);
  void spawn();
  void admit(base::TaskPtr task);
  void tellWhenFull(std::unique_lock<std::mutex>& lock);
  void releaseSlotLocked(std::unique_lock<std::mutex>& lock);

  const size_t requestThreads_;
  ThreadScope threadScope_;
  std::function<void()> afterTask_;
  base::Poller poller_;
  const std::shared_ptr<Signal> leaderSignal_;
  const size_t busyTarget_; // threads that run tasks before others join in
  std::atomic<size_t> polling_{0};
  std::atomic<size_t> busy_{0}; // running requests and completions
  std::atomic<uint64_t> taken_{0}; // tasks from the queues, ever
  std::atomic<bool> stopping_{false};
  std::atomic<bool> wakePending_{false};

  mutable std::mutex mutex_;
  std::condition_variable threadEnded_;
  std::deque<Work> ready_; // internal tasks and completions
  std::deque<Work> readyRequests_; // admitted
  std::atomic<size_t> readyCount_{0};
  std::deque<base::TaskPtr> backlog_; // requests, not yet admitted
  std::function<void(size_t, double)> fullHook_;
  std::chrono::steady_clock::time_point
      fullSince_; // a backlog that is not empty
  std::chrono::steady_clock::time_point nextFullHook_;
  size_t running_ = 0;
  size_t threads_ = 0;
};

class Executor::Claim {
 public:
  explicit Claim(bool claims);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  const bool claims_;
};

// Thread: the one that made it, except what signal() gives.
class Executor::Leader {
 public:
  explicit Leader(Executor& executor)
      : executor_(executor), lead_(executor.poller_, executor.leaderSignal_) {}

  // False when another thread leads already: wait in some other way then.
  bool leads() const {
    return lead_.leads();
  }
  // To be raised when what wait() waits for happens on another thread. A late
  // one does no harm.
  const std::shared_ptr<base::Poller::Lead::Signal>& signal() const {
    return executor_.leaderSignal_;
  }
  // Returns when `done`, or when the claimed task and what followed from it
  // have run; false after a signal of the system, and each second. To be
  // called once.
  bool wait(const std::function<bool()>& done);

 private:
  Executor& executor_;
  base::Poller::Lead lead_;
};

} // namespace torch_rpc_ext::agent
