#include "agent/executor.h"

#include "base/boundary.h"
#include "base/log.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

namespace torch_rpc_ext::agent {

namespace {

// Workers that call each other in circles may need a thread for each level of
// nesting. More threads than this are a bug of the application, for which no
// memory should be spent.
constexpr size_t kMaxThreads = 4096;
// Idle threads beyond requestThreads_ and this number end.
constexpr size_t kSpareThreads = 1;
// For how long no thread may take queued work before one more thread joins in.
constexpr int kStallMilliseconds = 1;
// A leader ends its wait after this time. An operating system signal does not
// always end the wait: the signal may have come to another thread, or while the
// leader was in a handler.
constexpr std::chrono::milliseconds kLookEvery{1000};
// A thread that polls reads the clock about every microsecond. If more time
// than this has passed between two readings, another thread had the core.
constexpr std::chrono::microseconds kInterruption{20};
// After how long a wait of requests for a thread is reported, and how often at
// most.
constexpr std::chrono::seconds kFullAfter{1};
constexpr std::chrono::seconds kFullEvery{60};

} // namespace

// The lock of Executor::state_ guards the Calls: of() takes a State&, which
// only that lock gives.
class Executor::RequestScope {
 public:
  struct Calls {
    size_t nested = 0; // calls of this request that are under way
    bool finished = false;
  };
  Calls& of(State&) {
    return calls_;
  }

 private:
  Calls calls_;
};

namespace {

// The state of the current thread for its executor.
struct ThreadState {
  Executor* executor = nullptr;
  // The thread will soon return to its loop, and can take one task there:
  // `next`.
  bool chainable = false;
  bool leads = false;
  bool waits = false; // inside of Leader::wait(), also when it leads no more
  Executor::Work next;
  Executor::Claims claims = Executor::Claims::kNothing;
  std::deque<Executor::Work> claimed;
  bool inRequest = false;
  Executor::RequestScopePtr scope;
};

thread_local ThreadState threadState;

} // namespace

Executor::Executor(size_t requestThreads, bool busyPoll)
    : requestThreads_(requestThreads),
      leaderSignal_(std::make_shared<Signal>()),
      busyPoll_(busyPoll),
      busyTarget_(std::max(2u, std::thread::hardware_concurrency())) {}

Executor::~Executor() {
  stop(/*milliseconds=*/0);
}

void Executor::start() {
  spawn();
}

void Executor::spawn() {
  {
    auto state = state_.lock();
    if (state->threads >= kMaxThreads) {
      base::log(
          base::LogLevel::kError,
          std::to_string(state->threads) +
              " threads wait in user code; no more are started");
      return;
    }
    ++state->threads;
  }
  polling_.fetch_add(1);
  try {
    std::thread([this] { threadMain(); }).detach();
  } catch (const std::exception& error) {
    polling_.fetch_sub(1);
    base::log(
        base::LogLevel::kError,
        std::string("cannot start a thread: ") + error.what());
    --state_.lock()->threads;
  }
}

// spawn() has already counted the new thread in polling_.
void Executor::threadMain() {
  threadState.executor = this;
  std::shared_ptr<void> scope; // if null, only Python is slower
  base::guarded(base::Boundary::kThread, [&] {
    scope = threadScope_ ? threadScope_() : nullptr;
  });
  bool joins = false;
  bool served = false; // the last task was a request
  for (;;) {
    // At the end all threads join in: the busy ones may wait for what is
    // queued.
    Work work = takeWork(joins || stopping_.load());
    if (work.task != nullptr) {
      const bool last = polling_.fetch_sub(1) == 1;
      if (last && !stopping_.load()) {
        spawn(); // a thread has to stay at the Poller
      }
      // Internal tasks do not count as busy: a copy may take long and needs no
      // GIL, so short tasks should run beside it.
      const size_t counts = work.kind == Kind::kInternal ? 0 : 1;
      served = work.kind == Kind::kRequest;
      busy_.fetch_add(counts);
      run(std::move(work));
      if (afterTask_) {
        base::caughtHere(base::Boundary::kTask, afterTask_);
      }
      busy_.fetch_sub(counts);
      joins = true; // this thread was busy before: no more threads get busy
      if (!comesBack()) {
        return endThread(std::move(scope));
      }
      continue;
    }
    if (stopping_.load()) {
      break;
    }
    // More threads than cores make a burst of short tasks slower. So while
    // enough threads are busy, this thread only watches the queue. It takes a
    // task when no task has been taken for a while, because then the busy
    // threads are blocked.
    bool attends = readyCount_.load() != 0;
    if (std::exchange(served, false) && !attends) {
      // The caller often sends its next request at once.
      pollForRequests();
      if (threadState.next.task != nullptr) {
        continue;
      }
      attends = readyCount_.load() != 0;
    }
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
      wakeOne(); // another thread attends from here on
    }
  }
  polling_.fetch_sub(1);
  poller_.wake(); // stop() wakes one thread, and each wakes the next
  endThread(std::move(scope));
}

template <typename Done>
void Executor::poll(
    base::Poller::Lead& lead,
    base::BusyPoll::For what,
    base::BusyPoll::Duration most,
    const Done& done) {
  using Clock = base::BusyPoll::Clock;
  const auto begin = Clock::now();
  auto now = begin;
  bool interrupted = false;
  while (!done() && now - begin < most && !lead.isWanted()) {
    const bool took = lead.poll();
    const auto before = std::exchange(now, Clock::now());
    interrupted = interrupted || (!took && now - before > kInterruption);
  }
  // What is above `most` is the time in which another thread had the core.
  const auto spent = std::min<base::BusyPoll::Duration>(now - begin, most);
  busyPoll_.ended(what, spent, done(), interrupted);
}

void Executor::pollForRequests() {
  using base::BusyPoll;
  using base::Poller;
  // Asked first, because to lead and to give back takes two system calls.
  const auto most =
      busyPoll_.allowance(BusyPoll::For::kRequest, BusyPoll::Clock::now());
  if (most == BusyPoll::Duration{0}) {
    return;
  }
  Poller::Lead lead(poller_, leaderSignal_, Poller::Lead::As::kGuest);
  if (lead.leads()) {
    threadState.chainable = true;
    poll(lead, BusyPoll::For::kRequest, most, [this] {
      return threadState.next.task != nullptr || readyCount_.load() != 0 ||
          stopping_.load();
    });
    threadState.chainable = false;
  }
}

// Counts this thread in polling_ again, unless there are enough without it;
// then the thread ends. A thread that will end is never counted, not even for a
// moment: another thread that leaves the Poller would rely on it.
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
  auto state = state_.lock();
  --state->threads;
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
    auto state = state_.lock();
    // Internal tasks and completions come first: a running request may be
    // waiting for one.
    auto& queue = state->ready.empty() ? state->readyRequests : state->ready;
    if (queue.empty()) {
      return work;
    }
    work = std::move(queue.front());
    queue.pop_front();
    readyCount_.fetch_sub(1);
    taken_.fetch_add(1);
  }
  // Each thread that takes work wakes at most one more thread: few threads
  // serve a burst of short tasks, and a long task holds nothing up.
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
  auto state = state_.lock();
  if (scope != nullptr) {
    auto& calls = scope->of(*state);
    calls.finished = true;
    if (calls.nested != 0) {
      return; // beginNested() has given its slot away
    }
  }
  base::TaskPtr next = releaseSlot(*state);
  state.unlock();
  admit(std::move(next));
}

void Executor::enqueue(Work work) {
  // A thread that waits for an answer does what that answer needs. A request
  // would run another caller's function in the middle of the wait.
  const bool mayRunHere = threadState.executor == this &&
      (work.kind != Kind::kRequest || !threadState.waits);
  if (mayRunHere && threadState.claims != Claims::kNothing) {
    auto& claimed = threadState.claimed;
    claimed.insert(
        threadState.claims == Claims::kFirst ? claimed.begin() : claimed.end(),
        std::move(work));
    return;
  }
  if (mayRunHere && threadState.chainable && threadState.next.task == nullptr) {
    threadState.next = std::move(work);
    return;
  }
  {
    auto state = state_.lock();
    auto& queue =
        work.kind == Kind::kRequest ? state->readyRequests : state->ready;
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
  auto state = state_.lock();
  if (state->running < requestThreads_) {
    ++state->running;
    state.unlock();
    admit(std::move(task));
    return;
  }
  state->backlog.push_back(std::move(task));
  const size_t waiting = state->backlog.size();
  const auto seconds = fullSecondsToTell(*state);
  state.unlock();
  if (seconds) {
    fullHook_(waiting, *seconds);
  }
}

// A request was added to the backlog. Returns for how long requests have been
// waiting, if fullHook_ is to be told.
std::optional<double> Executor::fullSecondsToTell(State& state) {
  const auto now = std::chrono::steady_clock::now();
  if (state.backlog.size() == 1) {
    state.fullSince = now;
  }
  // While an admitted request still waits to be taken, not all request threads
  // are busy.
  if (now < state.fullSince + kFullAfter || now < state.nextFullHook ||
      !fullHook_ || !state.readyRequests.empty()) {
    return std::nullopt;
  }
  state.nextFullHook = now + kFullEvery;
  return std::chrono::duration<double>(now - state.fullSince).count();
}

// Returns the request that gets the slot; null if none does.
base::TaskPtr Executor::releaseSlot(State& state) {
  if (state.backlog.empty() || state.running > requestThreads_) {
    --state.running;
    return nullptr;
  }
  base::TaskPtr next = std::move(state.backlog.front());
  state.backlog.pop_front();
  return next;
}

void Executor::admit(base::TaskPtr request) {
  if (request != nullptr) {
    enqueue({std::move(request), Kind::kRequest});
  }
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
  auto state = state_.lock();
  if (scope->of(*state).nested++ == 0) {
    base::TaskPtr next = releaseSlot(*state);
    state.unlock();
    admit(std::move(next));
  }
}

void Executor::endNested(const RequestScopePtr& scope) {
  auto state = state_.lock();
  auto& calls = scope->of(*state);
  if (--calls.nested == 0 && !calls.finished) {
    ++state->running; // maybe above the limit: the request goes on at once
  }
}

bool Executor::leads() const {
  return threadState.leads && threadState.executor == this;
}

Executor::Claim::Claim(Claims claims) {
  threadState.claims = claims;
}

Executor::Claim::~Claim() {
  threadState.claims = Claims::kNothing;
}

bool Executor::Leader::wait(const std::function<bool()>& done) {
  // A pool thread may lead inside of a user function; afterwards the thread
  // belongs to its executor as before.
  struct Restore {
    Executor* const executor = threadState.executor;
    const bool waits = threadState.waits;
    ~Restore() {
      threadState.executor = executor;
      threadState.leads = false;
      threadState.waits = waits;
    }
  } restore;
  threadState.executor = &executor_;
  threadState.leads = true;
  threadState.waits = true;
  // Events that concern other calls may end each wait early, so lead_.wait()
  // alone would not keep the time.
  const auto until = std::chrono::steady_clock::now() + kLookEvery;
  const auto over = [&] { return !threadState.claimed.empty() || done(); };
  using base::BusyPoll;
  const auto most = executor_.busyPoll_.allowance(
      BusyPoll::For::kAnswer, BusyPoll::Clock::now());
  if (most != BusyPoll::Duration{0}) {
    executor_.poll(lead_, BusyPoll::For::kAnswer, most, over);
  }
  bool interrupted = false;
  while (!over() && !interrupted) {
    interrupted =
        lead_.wait(kLookEvery.count()) == base::Poller::Ended::kTimeout ||
        std::chrono::steady_clock::now() > until;
  }
  threadState.leads = false;
  // The tasks below may take long, because they copy, or wait for the GIL:
  // another thread has to lead.
  lead_.give();
  while (!threadState.claimed.empty()) {
    Work work = std::move(threadState.claimed.front());
    threadState.claimed.pop_front();
    for (; work.task != nullptr; work = std::move(threadState.next)) {
      executor_.run(std::move(work));
    }
  }
  return !interrupted;
}

bool Executor::stop(int milliseconds) {
  auto dropped = std::exchange(state_.lock()->backlog, {});
  dropped.clear();
  stopping_.store(true);
  auto state = state_.lock();
  const auto deadline = std::chrono::steady_clock::now() +
      std::chrono::milliseconds(milliseconds);
  // A thread in user code sees stopping_ when it comes back.
  while (const size_t threads = state->threads) {
    poller_.wake();
    state.waitFor(threadEnded_, std::chrono::milliseconds(10), [&] {
      return state->threads != threads;
    });
    if (std::chrono::steady_clock::now() > deadline) {
      break;
    }
  }
  return state->threads == 0;
}

size_t Executor::runningRequests() const {
  return state_.lock()->running;
}

size_t Executor::queuedRequests() const {
  return state_.lock()->backlog.size();
}

size_t Executor::threads() const {
  return state_.lock()->threads;
}

} // namespace torch_rpc_ext::agent
