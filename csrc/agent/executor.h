#pragma once

#include "base/busy_poll.h"
#include "base/poller.h"
#include "base/synchronized.h"
#include "base/task.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

namespace torch_rpc_ext::agent {

// The threads of an agent, as leader and followers. All idle threads wait on
// one Poller. The thread that an event wakes runs the transport and then itself
// the first task that came out of the event, so that a call needs no hand-off
// between threads.
//
// There are three kinds of work:
//  - internal tasks (copies, decoding): never block on a peer;
//  - completions of futures: run user callbacks, which may block;
//  - requests: run user functions; at most `requestThreads` at a time.
//
// No work waits behind blocked user code: the last thread that leaves the
// Poller for a task starts another thread first, and a request does not count
// as running while it waits for its own nested call.
//
// Owns: its threads, the Poller, the queues.
// Thread: any.
// Outlives: the transport and everything that submits.
class Executor final : public base::TaskRunner {
 public:
  // One running request, as its nested calls see it.
  class RequestScope;
  using RequestScopePtr = std::shared_ptr<RequestScope>;

  // One queued task and its kind, which says what the task may do.
  enum class Kind { kInternal, kCompletion, kRequest };
  struct Work {
    base::TaskPtr task;
    Kind kind = Kind::kInternal;
  };

  // `busyPoll`: whether threads may poll for a moment before they sleep.
  explicit Executor(size_t requestThreads, bool busyPoll = false);
  ~Executor() override;

  base::Poller& poller() {
    return poller_;
  }

  // Each thread makes such an object when it starts and destroys it when it
  // ends. To be set before start().
  using ThreadScope = std::function<std::shared_ptr<void>()>;
  void setThreadScope(ThreadScope scope) {
    threadScope_ = std::move(scope);
  }
  // Runs on a thread of the pool after each task, to undo what user code has
  // changed in the state of the thread. To be set before start().
  void setAfterTask(std::function<void()> afterTask) {
    afterTask_ = std::move(afterTask);
  }
  void start();
  // Drops the requests that wait for a thread, and waits until the threads have
  // run the other tasks and ended. False when some were still in user code
  // after `milliseconds`: then the Executor must be kept for ever.
  bool stop(int milliseconds);

  void submit(base::TaskPtr task) override; // an internal task
  void submitCompletion(base::TaskPtr task);
  void submitRequest(base::TaskPtr task);

  // The request that this thread runs, or null. From beginNested() to
  // endNested() the request waits for a nested call.
  RequestScopePtr currentRequest();
  void beginNested(const RequestScopePtr& scope);
  void endNested(const RequestScopePtr& scope);

  // Lets the thread that waits for an answer serve the transport in place of
  // the pool, so that the answer needs no hand-off. One thread leads at a time;
  // the others that wait have a Mailbox.
  class Leader;
  // Whether this thread is inside Leader::wait().
  bool leads() const;
  // While a Claim lives on a thread that leads, the tasks that this thread
  // submits are kept for the thread itself. Its wait ends when it has such a
  // task, and it runs them. kFirst: a task comes before those that are kept
  // already; kLast: behind them.
  enum class Claims : uint8_t { kNothing, kFirst, kLast };
  class Claim;

  // `hook` runs when a further request has to wait and requests have been
  // waiting for a second or more; at most once a minute. To be set before
  // start().
  void setFullHook(std::function<void(size_t waiting, double seconds)> hook) {
    fullHook_ = std::move(hook);
  }

  size_t requestThreads() const {
    return requestThreads_;
  }
  // The numbers of requests that run, and that wait for a thread.
  size_t runningRequests() const;
  size_t queuedRequests() const;
  size_t threads() const;
  base::BusyPoll::Stats busyPolls() const {
    return busyPoll_.stats();
  }

 private:
  using Signal = base::Poller::Lead::Signal;
  struct State {
    std::deque<Work> ready; // internal tasks and completions
    std::deque<Work> readyRequests; // admitted
    std::deque<base::TaskPtr> backlog; // requests, not yet admitted
    // Since when the backlog is not empty.
    std::chrono::steady_clock::time_point fullSince;
    std::chrono::steady_clock::time_point nextFullHook;
    size_t running = 0;
    size_t threads = 0;
  };

  void threadMain();
  // Polls as the leader until `done`, a bool(), but for `most` at most.
  template <typename Done>
  void poll(
      base::Poller::Lead& lead,
      base::BusyPoll::For what,
      base::BusyPoll::Duration most,
      const Done& done);
  void pollForRequests();
  bool comesBack();
  void endThread(std::shared_ptr<void> scope);
  void enqueue(Work work);
  Work takeWork(bool joins);
  void wakeOne();
  void run(Work work);
  void spawn();
  std::optional<double> fullSecondsToTell(State& state);
  base::TaskPtr releaseSlot(State& state);
  void admit(base::TaskPtr request);

  const size_t requestThreads_;
  ThreadScope threadScope_;
  std::function<void()> afterTask_;
  std::function<void(size_t, double)> fullHook_;
  base::Poller poller_;
  const std::shared_ptr<Signal> leaderSignal_;
  base::BusyPoll busyPoll_;
  // While this many threads are busy, a thread without work only watches the
  // queue: it takes work when the busy threads are blocked.
  const size_t busyTarget_;
  std::atomic<size_t> polling_{0};
  std::atomic<size_t> busy_{0}; // running requests and completions
  std::atomic<size_t> readyCount_{0}; // tasks in the queues of admitted work
  std::atomic<uint64_t> taken_{0}; // tasks ever taken from these queues
  std::atomic<bool> stopping_{false};
  std::atomic<bool> wakePending_{false};

  base::Synchronized<State> state_;
  std::condition_variable threadEnded_;
};

class Executor::Claim {
 public:
  explicit Claim(Claims claims);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
};

// Thread: the one that constructs it; the signal, any.
class Executor::Leader {
 public:
  explicit Leader(Executor& executor)
      : executor_(executor), lead_(executor.poller_, executor.leaderSignal_) {}

  // False when another thread already leads: then the caller has to wait in
  // some other way.
  bool leads() const {
    return lead_.leads();
  }
  // To be raised when the event that wait() waits for happens on another
  // thread. Raising it late does no harm.
  const std::shared_ptr<base::Poller::Lead::Signal>& signal() const {
    return executor_.leaderSignal_;
  }
  // Returns true when `done`, or when the claimed tasks and the tasks that
  // followed from them have run; false after an operating system signal, and
  // after a second. To be called once.
  bool wait(const std::function<bool()>& done);

 private:
  Executor& executor_;
  base::Poller::Lead lead_;
};

} // namespace torch_rpc_ext::agent
