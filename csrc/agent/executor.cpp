#include "agent/executor.h"

#include "base/boundary.h"
#include "base/log.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <vector>

namespace torch_rpc_ext::agent {

namespace {

// A group that calls itself in circles may want a thread per level of nesting;
// beyond this it is a bug of the application that memory should not pay for.
constexpr size_t kMaxThreads = 4096;
// Idle threads above the number of request threads end.
constexpr size_t kSpareThreads = 1;
// For how long queued work may stand still before one more thread joins in.
constexpr int kStallMilliseconds = 1;
// A leader ends its wait so often: a signal of the system may have come while
// it was in a handler, or to another thread.
constexpr std::chrono::milliseconds kLookEvery{1000};
// When requests that wait for a thread are worth a word, and how often.
constexpr std::chrono::seconds kFullAfter{1};
constexpr std::chrono::seconds kFullEvery{60};

} // namespace

class Executor::RequestScope {
 public:
  size_t nested = 0; // calls of this request that are under way
  bool finished = false;
};

namespace {

// What the current thread is to an executor.
struct ThreadState {
  Executor* executor = nullptr;
  // The thread returns to its loop soon: it can take one more task along.
  bool chainable = false;
  bool leads = false;
  Executor::Work next;
  bool inRequest = false;
  Executor::RequestScopePtr scope;
};

thread_local ThreadState threadState;

} // namespace

Executor::Executor(size_t requestThreads)
    : requestThreads_(requestThreads),
      leaderSignal_(std::make_shared<Signal>()),
      busyTarget_(std::max(2u, std::thread::hardware_concurrency())) {}

Executor::~Executor() {
  stop(/*milliseconds=*/0);
}

void Executor::start() {
  spawn();
}

void Executor::spawn() {
  {
    std::lock_guard lock(mutex_);
    if (threads_ >= kMaxThreads) {
      base::log(
          base::LogLevel::kError,
          std::to_string(threads_) +
              " threads wait in user code; no more are started");
      return;
    }
    ++threads_;
  }
  polling_.fetch_add(1);
  try {
    std::thread([this] { threadMain(); }).detach();
  } catch (const std::exception& error) {
    polling_.fetch_sub(1);
    base::log(
        base::LogLevel::kError,
        std::string("cannot start a thread: ") + error.what());
    std::lock_guard lock(mutex_);
    --threads_;
  }
}

// Counted in polling_ on entry.
void Executor::threadMain() {
  threadState.executor = this;
  std::shared_ptr<void> scope; // only makes Python faster
  base::guarded(base::Boundary::kThread, [&] {
    scope = threadScope_ ? threadScope_() : nullptr;
  });
  bool joins = false;
  for (;;) {
    Work work = takeWork(joins);
    if (work.task != nullptr) {
      const bool last = polling_.fetch_sub(1) == 1;
      if (last && !stopping_.load()) {
        spawn(); // somebody has to stay at the Poller
      }
      // A copy may take long and needs no GIL: short work goes on beside it.
      const size_t counts = work.kind == Kind::kInternal ? 0 : 1;
      busy_.fetch_add(counts);
      run(std::move(work));
      if (afterTask_) {
        afterTask_();
      }
      busy_.fetch_sub(counts);
      joins = true; // it takes the place that it had
      if (!comesBack()) {
        return endThread(std::move(scope));
      }
      continue;
    }
    if (stopping_.load()) {
      break;
    }
    // More threads than cores make a burst of short tasks slower, so while
    // enough are busy this one only attends: it joins in when nothing has been
    // taken for a while, because then the others are blocked.
    const bool attends = readyCount_.load() != 0;
    if (attends) {
      wakePending_.store(true);
    }
    const uint64_t takenBefore = taken_.load();
    threadState.chainable = true;
    const auto ended = poller_.wait(attends ? kStallMilliseconds : -1);
    threadState.chainable = false;
    if (attends || ended == base::Poller::Ended::kWake) {
      wakePending_.store(false);
    }
    joins = attends && ended == base::Poller::Ended::kTimeout &&
        taken_.load() == takenBefore;
    if (attends && ended == base::Poller::Ended::kEvent) {
      wakeOne(); // somebody else attends from here
    }
  }
  polling_.fetch_sub(1);
  poller_.wake(); // stop() has woken one, and each wakes the next
  endThread(std::move(scope));
}

// A thread that is going to end is never counted, not for a moment: another
// one that leaves for a task then would think that this one stays.
bool Executor::comesBack() {
  size_t polling = polling_.load();
  do {
    if (polling >= requestThreads_ + kSpareThreads &&
        threadState.next.task == nullptr) {
      return false;
    }
  } while (!polling_.compare_exchange_weak(polling, polling + 1));
  return true;
}

void Executor::endThread(std::shared_ptr<void> scope) {
  threadState.executor = nullptr;
  scope.reset();
  std::lock_guard lock(mutex_);
  --threads_;
  threadEnded_.notify_all();
}

void Executor::wakeOne() {
  if (readyCount_.load() != 0 && !wakePending_.exchange(true)) {
    poller_.wake();
  }
}

Executor::Work Executor::takeWork(bool joins) {
  Work work;
  if (threadState.next.task != nullptr) {
    return std::move(threadState.next);
  }
  if (readyCount_.load() == 0 || (!joins && busy_.load() >= busyTarget_)) {
    return work;
  }
  {
    std::lock_guard lock(mutex_);
    // Responses first: a request may be waiting for one.
    auto& queue = ready_.empty() ? readyRequests_ : ready_;
    if (queue.empty()) {
      return work;
    }
    work = std::move(queue.front());
    queue.pop_front();
    readyCount_.fetch_sub(1);
    taken_.fetch_add(1);
  }
  // Each thread that takes work wakes at most one more: a burst of short tasks
  // is served by few threads, and a long task holds nothing up.
  wakeOne();
  return work;
}

void Executor::run(Work work) {
  const bool isRequest = work.kind == Kind::kRequest;
  threadState.chainable = work.kind == Kind::kInternal;
  threadState.inRequest |= isRequest;
  base::caughtHere(base::Boundary::kTask, [&] { work.task->run(); });
  work.task.reset();
  threadState.chainable = false;
  if (!isRequest) {
    return;
  }
  threadState.inRequest = false;
  const RequestScopePtr scope = std::move(threadState.scope);
  std::unique_lock lock(mutex_);
  if (scope != nullptr) {
    scope->finished = true;
    if (scope->nested != 0) {
      return; // its slot was given away already
    }
  }
  releaseSlotLocked(lock);
}

void Executor::enqueue(Work work) {
  if (threadState.executor == this && threadState.chainable &&
      threadState.next.task == nullptr) {
    threadState.next = std::move(work);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    auto& queue = work.kind == Kind::kRequest ? readyRequests_ : ready_;
    queue.push_back(std::move(work));
    readyCount_.fetch_add(1);
  }
  wakeOne();
}

void Executor::submit(base::TaskPtr task) {
  enqueue({std::move(task), Kind::kInternal});
}

void Executor::submitCompletion(base::TaskPtr task) {
  enqueue({std::move(task), Kind::kCompletion});
}

void Executor::submitRequest(base::TaskPtr task) {
  {
    std::unique_lock lock(mutex_);
    if (running_ >= requestThreads_) {
      backlog_.push_back(std::move(task));
      tellWhenFull(lock);
      return;
    }
    ++running_;
  }
  admit(std::move(task));
}

void Executor::tellWhenFull(std::unique_lock<std::mutex>& lock) {
  const auto now = std::chrono::steady_clock::now();
  if (backlog_.size() == 1) {
    fullSince_ = now;
  }
  // An admitted request that no thread has taken yet keeps none busy.
  if (now < fullSince_ + kFullAfter || now < nextFullHook_ || !fullHook_ ||
      !readyRequests_.empty()) {
    return;
  }
  nextFullHook_ = now + kFullEvery;
  const size_t waiting = backlog_.size();
  const double seconds =
      std::chrono::duration<double>(now - fullSince_).count();
  lock.unlock();
  fullHook_(waiting, seconds);
}

void Executor::admit(base::TaskPtr task) {
  enqueue({std::move(task), Kind::kRequest});
}

void Executor::releaseSlotLocked(std::unique_lock<std::mutex>& lock) {
  if (backlog_.empty() || running_ > requestThreads_) {
    --running_;
    return;
  }
  base::TaskPtr next = std::move(backlog_.front());
  backlog_.pop_front();
  lock.unlock();
  admit(std::move(next));
}

Executor::RequestScopePtr Executor::currentRequest() {
  if (threadState.executor != this || !threadState.inRequest) {
    return nullptr;
  }
  if (threadState.scope == nullptr) {
    threadState.scope = std::make_shared<RequestScope>();
  }
  return threadState.scope;
}

void Executor::beginNested(const RequestScopePtr& scope) {
  std::unique_lock lock(mutex_);
  if (scope->nested++ == 0) {
    releaseSlotLocked(lock);
  }
}

void Executor::endNested(const RequestScopePtr& scope) {
  std::lock_guard lock(mutex_);
  if (--scope->nested == 0 && !scope->finished) {
    ++running_; // it was promised: above the limit rather than blocked
  }
}

bool Executor::leads() const {
  return threadState.leads && threadState.executor == this;
}

Executor::Claim::Claim(bool claims) : claims_(claims) {
  if (claims_) {
    threadState.chainable = true;
  }
}

Executor::Claim::~Claim() {
  if (claims_) {
    threadState.chainable = false;
  }
}

bool Executor::Leader::wait(const std::function<bool()>& done) {
  // A pool thread that waits inside a user function stays one.
  struct Restore {
    Executor* const executor = threadState.executor;
    ~Restore() {
      threadState.executor = executor;
      threadState.leads = false;
    }
  } restore;
  threadState.executor = &executor_;
  threadState.leads = true;
  // Events for others may come again and again.
  const auto until = std::chrono::steady_clock::now() + kLookEvery;
  bool interrupted = false;
  while (threadState.next.task == nullptr && !done() && !interrupted) {
    interrupted =
        lead_.wait(kLookEvery.count()) == base::Poller::Ended::kTimeout ||
        std::chrono::steady_clock::now() > until;
  }
  threadState.leads = false;
  // From here on it may take long: copies, and the GIL.
  lead_.give();
  while (threadState.next.task != nullptr) {
    executor_.run(std::move(threadState.next));
  }
  return !interrupted;
}

bool Executor::stop(int milliseconds) {
  std::deque<base::TaskPtr> dropped;
  {
    std::lock_guard lock(mutex_);
    dropped.swap(backlog_);
  }
  dropped.clear();
  stopping_.store(true);
  std::unique_lock lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() +
      std::chrono::milliseconds(milliseconds);
  // A thread in user code looks at stopping_ when it comes back.
  while (threads_ != 0) {
    poller_.wake();
    threadEnded_.wait_for(lock, std::chrono::milliseconds(10));
    if (std::chrono::steady_clock::now() > deadline) {
      break;
    }
  }
  return threads_ == 0;
}

size_t Executor::runningRequests() const {
  std::lock_guard lock(mutex_);
  return running_;
}

size_t Executor::queuedRequests() const {
  std::lock_guard lock(mutex_);
  return backlog_.size();
}

size_t Executor::threads() const {
  std::lock_guard lock(mutex_);
  return threads_;
}

} // namespace torch_rpc_ext::agent
