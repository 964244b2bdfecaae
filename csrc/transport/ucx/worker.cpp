#include "transport/ucx/worker.h"

#include "base/log.h"
#include "transport/ucx/status.h"
#include "transport/ucx/unfinished_endpoints.h"

#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace torch_rpc_ext::transport::ucx {

namespace {

// How often takeAll() tries to arm UCX before it hands on what has arrived.
// Each frame that arrives meanwhile makes another try necessary, and the first
// frames need not wait for the last.
constexpr int kProgressRounds = 32;
// How long a thread sleeps between two polls while a peer's queue is full.
constexpr int kStuckMicroseconds = 100;
// progressAll() calls ucp_worker_progress() at most this often.
constexpr int kMostProgress = 10'000;

} // namespace

template <WorkerRole role>
base::Result<std::shared_ptr<Worker<role>>> Worker<role>::create(
    std::shared_ptr<UcpContext> context,
    std::shared_ptr<base::Gate> gate) {
  ucp_worker_params_t params{};
  params.field_mask =
      UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS;
  // mutex_ serialises all calls, whichever thread makes them.
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  params.events = UCP_WAKEUP_RX | UCP_WAKEUP_TX;
  ucp_worker_h worker = nullptr;
  ucs_status_t status = ucp_worker_create(context->get(), &params, &worker);
  if (status != UCS_OK) {
    base::Error error = toError(status, "creating a UCX worker");
    if (error.kind == base::ErrorKind::kPeerLost) {
      error.kind = base::ErrorKind::kSystem; // no peer takes part
    }
    return error;
  }
  int fd = -1;
  status = ucp_worker_get_efd(worker, &fd);
  if (status != UCS_OK) {
    ucp_worker_destroy(worker);
    return toError(status, "getting the event descriptor of a UCX worker");
  }
  return std::shared_ptr<Worker>(
      new Worker(std::move(context), std::move(gate), worker, fd));
}

template <WorkerRole role>
Worker<role>::Worker(
    std::shared_ptr<UcpContext> context,
    std::shared_ptr<base::Gate> gate,
    ucp_worker_h worker,
    int fd)
    : context_(std::move(context)),
      gate_(std::move(gate)),
      worker_(worker),
      eventFd_(fd) {}

template <WorkerRole role>
Worker<role>::~Worker() {
  stop();
  Locked locked(*this); // because UCX may call back
  if (hasUnfinishedEndpoint(worker_)) {
    context_->keep();
    return;
  }
  ucp_worker_destroy(worker_);
}

template <WorkerRole role>
void Worker<role>::start(base::Poller& poller, bool main) {
  poller_ = &poller;
  if (main) {
    poller.addMain(eventFd_, [this] { onEvent(); }, [this] { return look(); });
  } else {
    poller.add(eventFd_, [this] { onEvent(); });
  }
  progressSoon(); // a polling thread arms the worker, also at the start
}

template <WorkerRole role>
WorkerAddress Worker<role>::address() const {
  const auto query = [this](uint32_t flags) {
    ucp_worker_attr_t attr{};
    attr.field_mask =
        UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
    attr.address_flags = flags;
    if (ucp_worker_query(worker_, &attr) != UCS_OK) {
      return std::string();
    }
    std::string bytes(
        reinterpret_cast<const char*>(attr.address), attr.address_length);
    ucp_worker_release_address(worker_, attr.address);
    return bytes;
  };
  return {query(0), query(UCP_WORKER_ADDRESS_FLAG_NET_ONLY)};
}

template <WorkerRole role>
typename Worker<role>::Locked& Worker<role>::held() {
  if (held_ == nullptr) {
    // If this thread went on, it could corrupt what the lock guards.
    base::log(
        base::LogLevel::kError,
        "UCX calls back while no thread holds its worker's lock");
    std::abort();
  }
  return *held_;
}

template <WorkerRole role>
void Worker<role>::enqueue(std::unique_ptr<Operation> operation) {
  const auto operations = operations_.lock();
  operations->push_back(std::move(operation));
  hasOperations_.store(true, std::memory_order_release);
}

template <WorkerRole role>
void Worker<role>::drainOperations(Locked& locked) {
  while (hasOperations_.load(std::memory_order_acquire)) {
    std::vector<std::unique_ptr<Operation>> operations;
    {
      const auto waiting = operations_.lock();
      operations.swap(*waiting);
      hasOperations_.store(false, std::memory_order_release);
    }
    for (auto& operation : operations) {
      base::caughtHere(
          base::Boundary::kOperation, [&] { operation->run(locked); });
    }
  }
}

template <WorkerRole role>
void Worker<role>::finish() {
  do {
    std::vector<base::TaskPtr> deferred;
    {
      Locked locked(*this);
      drainOperations(locked);
      deferred.swap(deferred_);
      const bool signal = std::exchange(needProgress_, false);
      if (signal && !stopped_.load(std::memory_order_relaxed)) {
        ucp_worker_signal(worker_);
      }
    }
    std::optional<base::Gate::Inside> inside;
    if (!deferred.empty()) {
      // Before the unlock, so that stop() of the context, once it gets the
      // lock, sees this thread inside of the gate and waits for it.
      inside.emplace(*gate_);
    }
    mutex_.unlock();
    for (auto& task : deferred) {
      base::caughtHere(base::Boundary::kDeferred, [&] { task->run(); });
      // The task dies here, without the lock: it may hold the last reference to
      // a tensor, whose release may run any code.
      task.reset();
    }
  } while (hasOperations_.load(std::memory_order_acquire) && mutex_.try_lock());
}

template <WorkerRole role>
void Worker<role>::onEvent() {
  const base::Gate::Inside inside(*gate_);
  // The event is one-shot and this thread has consumed it. So this thread has
  // to wait for the lock and arm the worker again: if it gave up here, later
  // messages would wake no thread.
  mutex_.lock();
  if (stopped_.load(std::memory_order_relaxed)) {
    finish();
    return;
  }
  if (!takeAll(/*progressed=*/false)) {
    // This polling must not take a whole core while that peer sleeps.
    usleep(kStuckMicroseconds);
  }
  poller_->rearm(eventFd_);
}

template <WorkerRole role>
bool Worker<role>::look() {
  const base::Gate::Inside inside(*gate_);
  if (!mutex_.try_lock()) {
    return false; // the thread that holds the lock may be progressing
  }
  bool progressed = false;
  if (!stopped_.load(std::memory_order_relaxed)) {
    const Locked locked(*this);
    progressed = ucp_worker_progress(worker_) != 0;
  }
  if (progressed) {
    takeAll(progressed);
  } else {
    // UCX is armed as before. Operations that were queued meanwhile run now.
    finish();
  }
  return progressed;
}

template <WorkerRole role>
bool Worker<role>::takeAll(bool progressed) {
  bool armed = false;
  {
    Locked locked(*this);
    bool more = false;
    for (int round = 0; round < kProgressRounds && !armed && !more; ++round) {
      drainOperations(locked);
      const int calls = progress(locked, kMostCalls);
      progressed = progressed || calls != 0;
      more = calls == kMostCalls;
      armed = !more && ucp_worker_arm(worker_) == UCS_OK;
    }
  }
  // If the worker is armed, messages in flight will raise an event. If it could
  // not be armed, there is more to do, and ucp_worker_signal() in finish()
  // makes some thread go on at once.
  needProgress_ = !armed;
  finish();
  return armed || progressed;
}

template <WorkerRole role>
int Worker<role>::progress(Locked&, int most) {
  int calls = 0;
  while (calls < most && ucp_worker_progress(worker_) != 0) {
    ++calls;
  }
  return calls;
}

template <WorkerRole role>
void Worker<role>::Locked::progressAll() {
  worker_.progress(*this, kMostProgress);
}

template <WorkerRole role>
void Worker<role>::stop() {
  if (!stopped_.exchange(true) && poller_ != nullptr) {
    poller_->remove(eventFd_);
    // A thread that progresses now holds the lock, so this waits for it. No
    // thread progresses the worker after this.
    runLocked([](Locked&) {});
  }
}

template class Worker<WorkerRole::kControl>;
template class Worker<WorkerRole::kBulk>;

} // namespace torch_rpc_ext::transport::ucx
