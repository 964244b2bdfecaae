#include "transport/ucx/worker.h"

#include "base/log.h"
#include "transport/ucx/status.h"

#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <optional>
#include <string>

namespace torch_rpc_ext::transport::ucx {

namespace {

// A burst of frames is handed on in pieces, so that the first of them need not
// wait for the last.
constexpr int kProgressRounds = 32;
constexpr int kStuckMicroseconds = 100;
constexpr int kMostProgress = 10'000;

} // namespace

int64_t monotonicMilliseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

template <WorkerRole role>
base::Result<std::shared_ptr<Worker<role>>> Worker<role>::create(
    std::shared_ptr<UcpContext> context,
    std::shared_ptr<base::Gate> gate) {
  ucp_worker_params_t params{};
  params.field_mask =
      UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS;
  // Our own lock serialises the calls, whichever thread makes them.
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  params.events = UCP_WAKEUP_RX | UCP_WAKEUP_TX;
  ucp_worker_h worker = nullptr;
  ucs_status_t status = ucp_worker_create(context->get(), &params, &worker);
  if (status != UCS_OK) {
    return toError(
        status, "creating a UCX worker (is the port range used up?)");
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
  Locked locked(*this); // UCX may call back
  ucp_worker_destroy(worker_);
}

template <WorkerRole role>
void Worker<role>::start(base::Poller& poller, bool main) {
  poller_ = &poller;
  auto handler = [this] { onEvent(); };
  main ? poller.addMain(eventFd_, handler) : poller.add(eventFd_, handler);
  progressSoon(); // the first arm happens on a polling thread too
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
    // Going on would corrupt what the lock guards.
    base::log(
        base::LogLevel::kError,
        "UCX calls back while no thread holds its worker's lock");
    std::abort();
  }
  return *held_;
}

template <WorkerRole role>
void Worker<role>::enqueue(std::unique_ptr<Operation> operation) {
  std::lock_guard lock(operationsMutex_);
  operations_.push_back(std::move(operation));
  hasOperations_.store(true, std::memory_order_release);
}

template <WorkerRole role>
void Worker<role>::drainOperations(Locked& locked) {
  while (hasOperations_.load(std::memory_order_acquire)) {
    std::vector<std::unique_ptr<Operation>> operations;
    {
      std::lock_guard lock(operationsMutex_);
      operations.swap(operations_);
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
      inside.emplace(*gate_); // before another thread can have the lock
    }
    mutex_.unlock();
    for (auto& task : deferred) {
      base::caughtHere(base::Boundary::kDeferred, [&] { task->run(); });
      // Here and not before: what the task held may be the last reference to a
      // tensor, and run any code.
      task.reset();
    }
  } while (hasOperations_.load(std::memory_order_acquire) && mutex_.try_lock());
}

template <WorkerRole role>
void Worker<role>::onEvent() {
  const base::Gate::Inside inside(*gate_);
  // The one-shot event is consumed, so this thread has to wait for the lock and
  // re-arm: giving up here would lose the wake-up for ever.
  mutex_.lock();
  if (stopped_.load(std::memory_order_relaxed)) {
    finish();
    return;
  }
  bool armed = false;
  bool progressed = false;
  {
    Locked locked(*this);
    for (int round = 0; round < kProgressRounds && !armed; ++round) {
      drainOperations(locked);
      while (ucp_worker_progress(worker_) != 0) {
        progressed = true;
      }
      armed = ucp_worker_arm(worker_) == UCS_OK;
    }
  }
  // What is in flight will raise an event now that the worker is armed; when
  // it cannot be armed, signal() makes some thread go on at once.
  needProgress_ = !armed;
  finish();
  if (!armed && !progressed) {
    // A peer's queue is full and stays full: UCX can only poll for it, which
    // must not cost a core for as long as that peer sleeps.
    usleep(kStuckMicroseconds);
  }
  poller_->rearm(eventFd_);
}

template <WorkerRole role>
void Worker<role>::Locked::progressAll() {
  // Others may go on sending.
  for (int i = 0; i < kMostProgress && ucp_worker_progress(get()) != 0; ++i) {
  }
}

template <WorkerRole role>
void Worker<role>::stop() {
  if (!stopped_.exchange(true) && poller_ != nullptr) {
    poller_->remove(eventFd_);
    // Whoever progresses now has the lock; nobody progresses after this.
    runLocked([](Locked&) {});
  }
}

template class Worker<WorkerRole::kControl>;
template class Worker<WorkerRole::kBulk>;

} // namespace torch_rpc_ext::transport::ucx
