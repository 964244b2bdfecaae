#include "transport/ucx/worker.h"

#include "base/boundary.h"
#include "transport/ucx/status.h"

#include <unistd.h>

#include <ctime>

namespace torch_rpc_ext::transport::ucx {

namespace {

// A burst of frames is handed on in pieces, so that the first of them need not
// wait for the last.
constexpr int kProgressRounds = 32;
constexpr int kStuckMicroseconds = 100;
constexpr int kMostProgress = 10'000;

} // namespace

namespace {

// What throws under the lock must not leave it locked.
void runUnderLock(base::Task& operation) {
  base::caughtHere(base::Boundary::kOperation, [&] { operation.run(); });
}

} // namespace

int64_t monotonicMilliseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

base::Result<std::shared_ptr<Worker>> Worker::create(
    std::shared_ptr<UcpContext> context) {
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
  return std::shared_ptr<Worker>(new Worker(std::move(context), worker, fd));
}

Worker::Worker(std::shared_ptr<UcpContext> context, ucp_worker_h worker, int fd)
    : context_(std::move(context)), worker_(worker), eventFd_(fd) {}

Worker::~Worker() {
  stop();
  ucp_worker_destroy(worker_);
}

void Worker::start(base::Poller& poller, bool main) {
  poller_ = &poller;
  auto handler = [this] { onEvent(); };
  main ? poller.addMain(eventFd_, handler) : poller.add(eventFd_, handler);
  progressSoon(); // the first arm happens on a polling thread too
}

WorkerAddress Worker::address() const {
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

void Worker::post(base::TaskPtr operation) {
  if (mutex_.try_lock()) {
    runUnderLock(*operation);
    operation.reset();
    finish();
    return;
  }
  postAfter(std::move(operation));
  // The holder looks at the queue after it has released the lock. If it has
  // already looked, the lock is free now and the queue is ours to drain.
  if (mutex_.try_lock()) {
    finish();
  }
}

void Worker::postAfter(base::TaskPtr operation) {
  std::lock_guard lock(operationsMutex_);
  operations_.push_back(std::move(operation));
  hasOperations_.store(true, std::memory_order_release);
}

void Worker::drainOperations() {
  while (hasOperations_.load(std::memory_order_acquire)) {
    std::vector<base::TaskPtr> operations;
    {
      std::lock_guard lock(operationsMutex_);
      operations.swap(operations_);
      hasOperations_.store(false, std::memory_order_release);
    }
    for (auto& operation : operations) {
      runUnderLock(*operation);
    }
  }
}

void Worker::finish() {
  for (;;) {
    drainOperations();
    std::vector<base::TaskPtr> deferred;
    deferred.swap(deferred_);
    const bool signal = std::exchange(needProgress_, false);
    if (signal && !stopped_.load(std::memory_order_relaxed)) {
      ucp_worker_signal(worker_);
    }
    mutex_.unlock();
    for (auto& task : deferred) {
      base::caughtHere(base::Boundary::kDeferred, [&] { task->run(); });
      // Here and not under the lock: what it held may be the last reference to
      // a tensor, and run any code.
      task.reset();
    }
    if (!hasOperations_.load(std::memory_order_acquire) || !mutex_.try_lock()) {
      return;
    }
  }
}

void Worker::onEvent() {
  // The one-shot event is consumed, so this thread has to take the lock and
  // re-arm: giving up here would lose the wake-up for ever.
  mutex_.lock();
  if (stopped_.load(std::memory_order_relaxed)) {
    finish();
    return;
  }
  bool armed = false;
  bool progressed = false;
  for (int round = 0; round < kProgressRounds && !armed; ++round) {
    drainOperations();
    while (ucp_worker_progress(worker_) != 0) {
      progressed = true;
    }
    armed = ucp_worker_arm(worker_) == UCS_OK;
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

void Worker::progressAll() {
  // Others may go on sending.
  for (int i = 0; i < kMostProgress && ucp_worker_progress(worker_) != 0; ++i) {
  }
}

void Worker::stop() {
  if (stopped_.exchange(true)) {
    return;
  }
  if (poller_ != nullptr) {
    poller_->remove(eventFd_);
  }
}

} // namespace torch_rpc_ext::transport::ucx
