#pragma once

#include "base/poller.h"
#include "base/task.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
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

  size_t requestThreads() const {
    return requestThreads_;
  }
  // Requests that run now, and that wait for a thread.
  size_t runningRequests() const;
  size_t queuedRequests() const;
  size_t threads() const;

 private:
  void threadMain();
  void enqueue(Work work);
  Work takeWork(bool joins);
  void wakeOne();
  void run(Work work);
  void spawn();
  void admit(base::TaskPtr task);
  void releaseSlotLocked(std::unique_lock<std::mutex>& lock);

  const size_t requestThreads_;
  base::Poller poller_;
  const size_t busyTarget_; // threads that run tasks before others join in
  std::atomic<size_t> polling_{0};
  std::atomic<size_t> busy_{0};
  std::atomic<uint64_t> taken_{0}; // tasks from the queues, ever
  std::atomic<bool> stopping_{false};
  std::atomic<bool> wakePending_{false};

  mutable std::mutex mutex_;
  std::condition_variable threadEnded_;
  std::deque<Work> ready_; // internal tasks and completions
  std::deque<Work> readyRequests_; // admitted
  std::atomic<size_t> readyCount_{0};
  std::deque<base::TaskPtr> backlog_; // requests, not yet admitted
  size_t running_ = 0;
  size_t threads_ = 0;
};

} // namespace torch_rpc_ext::agent
