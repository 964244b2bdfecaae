#include "transport/ucx/context.h"

#include "transport/ucx/from_ucx.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// How many milliseconds stop() waits for sent messages to leave. Bounded,
// because a peer that does not read must not keep this process from ending.
constexpr int kDrainMilliseconds = 1000;
// The longest time between our reading a peer's memory and our telling the peer
// that the memory is its own again.
constexpr std::chrono::milliseconds kAcknowledgeAfter{5};
constexpr size_t kMaxBroken = 64;
constexpr size_t kMaxParked = 64;
// How long a handshake may take. Long, because on a loaded machine a peer may
// be slow; limited, because a stranger who replays a recorded kOpen never
// finishes.
constexpr std::chrono::seconds kHandshakeTime{30};
// When a process is killed, the kernel first resets its sockets and then
// reports its end. A doubted peer's process has this time to be seen to end.
// The kernel needs microseconds, and longer only if the core is busy.
constexpr std::chrono::seconds kDoubtTime{2};

} // namespace

base::Result<std::shared_ptr<UcxContext>> UcxContext::create(
    const Options& options) {
  auto ucp = UcpContext::create(options);
  if (!ucp.ok()) {
    return ucp.error();
  }
  const auto gate = std::make_shared<base::Gate>();
  auto worker = ControlWorker::create(ucp.value(), gate);
  if (!worker.ok()) {
    return worker.error();
  }
  std::shared_ptr<BulkWorker> bulk;
  if (options.ports.first != 0) {
    // If this worker were made later, the first large tensor could find that
    // the range has no port left.
    auto created = BulkWorker::create(ucp.value(), gate);
    if (!created.ok()) {
      return created.error();
    }
    bulk = std::move(created.value());
  }
  return std::shared_ptr<UcxContext>(new UcxContext(
      options, ucp.value(), gate, worker.value(), std::move(bulk)));
}

UcxContext::UcxContext(
    Options options,
    std::shared_ptr<UcpContext> ucp,
    std::shared_ptr<base::Gate> gate,
    std::shared_ptr<ControlWorker> control,
    std::shared_ptr<BulkWorker> bulk)
    : options_(std::move(options)),
      ucp_(std::move(ucp)),
      gate_(std::move(gate)),
      control_(std::move(control)),
      workerAddress_(control_->address()),
      doorToken_(randomToken()),
      bulkWorker_(std::move(bulk)) {}

UcxContext::~UcxContext() = default;

std::string UcxContext::address() const {
  return encodeAddress({doorToken_, process(), workerAddress_});
}

void UcxContext::start(
    base::Poller& poller,
    base::TaskRunner& runner,
    Handler& handler) {
  poller_ = &poller;
  runner_ = &runner;
  handler_ = &handler;
  ucp_am_handler_param_t params{};
  params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  params.id = kActiveMessageId;
  params.cb = FromUcx<
      base::Boundary::kMessage,
      &UcxContext::onMessage,
      &UcxContext::onLostMessage>::message;
  params.arg = this;
  control_->runLocked([&](Locked& locked) {
    ucp_worker_set_am_recv_handler(locked.get(), &params);
  });
  slots_.emplace(poller, runner, [this] { progressSoon(); });
  control_->start(poller, /*main=*/true);
  acknowledgeTimer_.emplace(poller, [this] {
    control_->post([this](Locked& locked) { acknowledgeNow(locked); });
  });
  openings_.emplace(
      poller,
      *control_,
      kHandshakeTime,
      [](Locked& locked, const auto& connection) {
        if (connection->peer() == PeerState::kConnecting) {
          connection->hear(
              locked,
              PeerWord::kPathLost,
              {base::ErrorKind::kPeerLost,
               "no answer to the introduction within " +
                   std::to_string(kHandshakeTime.count()) +
                   " s (a worker that hangs, or knows another secret)"});
        }
      });
  doubts_.emplace(
      poller,
      *control_,
      kDoubtTime,
      [](Locked& locked, const auto& connection) {
        connection->onDoubtOver(locked);
      });
}

ConnectionPtr UcxContext::connect(
    const std::string& address,
    const std::string& hello) {
  std::shared_ptr<UcxConnection> connection;
  // This thread waits for the lock only to enter the connection into the map.
  // The endpoint is opened by a posted operation, which reports its failure
  // through onClosed().
  control_->runLocked([&](Locked& locked) {
    connection = makeConnection(locked, /*initiator=*/true);
  });
  control_->post([this, connection, address, hello](Locked& locked) {
    if (stopped_.load()) {
      connection->fail(
          locked, {base::ErrorKind::kShutDown, "the transport has ended"});
      return;
    }
    auto parsed = parseAddress(address);
    if (!parsed.ok()) {
      connection->fail(locked, parsed.error());
      return;
    }
    const ContextAddress& peer = parsed.value();
    base::Error error = groupKey_.empty()
        ? base::Error{base::ErrorKind::kRefused, "this worker has no secret"}
        : connection->open(locked, peer, hello);
    if (error) {
      connection->fail(locked, std::move(error));
    }
  });
  return connection;
}

base::Result<std::shared_ptr<BulkChannel>> UcxContext::bulk() {
  std::lock_guard lock(bulkMutex_);
  if (bulk_ == nullptr) {
    if (stopped_.load()) {
      return base::Error{base::ErrorKind::kShutDown, "the transport has ended"};
    }
    if (bulkWorker_ == nullptr) {
      auto created = BulkWorker::create(ucp_, gate_);
      if (!created.ok()) {
        return created.error();
      }
      bulkWorker_ = std::move(created.value());
    }
    bulk_ = std::make_shared<BulkChannel>(std::move(bulkWorker_), *poller_);
    slots_->workerAdded();
  }
  return bulk_;
}

void UcxContext::progressSoon() {
  control_->progressSoon();
  const std::lock_guard lock(bulkMutex_);
  if (bulk_ != nullptr) {
    bulk_->progressSoon();
  }
}

void UcxContext::acknowledgeSoon(
    Locked&,
    std::shared_ptr<UcxConnection> connection) {
  if (acknowledging_.empty()) {
    acknowledgeTimer_->set(base::Timer::Clock::now() + kAcknowledgeAfter);
  }
  acknowledging_.push_back(std::move(connection));
}

void UcxContext::acknowledgeNow(Locked& locked) {
  for (auto& connection : std::exchange(acknowledging_, {})) {
    connection->acknowledge(locked);
  }
}

void UcxContext::keep(Locked& locked, std::shared_ptr<PeerWatch> watch) {
  std::erase_if(
      watches_, [&](const auto& former) { return !former->holds(locked); });
  watches_.push_back(std::move(watch));
}

void UcxContext::forget(
    Locked&,
    uint64_t localToken,
    const std::shared_ptr<UcxConnection>& broken) {
  connections_.erase(localToken);
  if (broken != nullptr && !stopped_.load()) {
    broken_.emplace_back(localToken, broken);
    if (broken_.size() > kMaxBroken) {
      broken_.pop_front();
    }
  }
}

bool UcxContext::park(
    Locked& locked,
    std::shared_ptr<UcxConnection> connection) {
  if (stopped_.load()) {
    return false;
  }
  parked_.push_back(std::move(connection));
  if (parked_.size() > kMaxParked) {
    unpark(locked, *parked_.front());
  }
  return true;
}

void UcxContext::unpark(Locked& locked, const UcxConnection& connection) {
  const auto it =
      std::find_if(parked_.begin(), parked_.end(), [&](const auto& parked) {
        return parked.get() == &connection;
      });
  if (it != parked_.end()) {
    const auto parked = std::move(*it);
    parked_.erase(it);
    parked->leavePark(locked);
  }
}

void UcxContext::stop() {
  if (stopped_.exchange(true)) {
    // Another thread is stopping the context. It waits for this thread if this
    // thread is inside of the gate, so this thread must not wait then.
    if (!gate_->holdsThisThread()) {
      gate_->wait();
    }
    return;
  }
  if (poller_ == nullptr) {
    gate_->close();
    return;
  }
  acknowledgeTimer_->stop();
  openings_->stop();
  doubts_->stop();
  slots_->stop();
  control_->runLocked([this](Locked& locked) {
    acknowledgeNow(locked);
    broken_.clear();
    while (!parked_.empty()) {
      unpark(locked, *parked_.front());
    }
  });
  // Peers that still read this process's memory get a moment to finish.
  control_->progressUntil(
      [this](Locked& locked) {
        return std::none_of(
            connections_.begin(), connections_.end(), [&](const auto& entry) {
              return entry.second->lending(locked);
            });
      },
      kDrainMilliseconds);
  control_->progressUntil(
      [this](Locked& locked) {
        // In each round, because a peer may connect meanwhile.
        for (const auto& [token, connection] :
             std::exchange(connections_, {})) {
          connection->closeNow(locked);
        }
        return closing_ == 0;
      },
      kDrainMilliseconds);
  std::shared_ptr<BulkChannel> bulk;
  {
    std::lock_guard lock(bulkMutex_);
    bulk = bulk_;
  }
  if (bulk) {
    bulk->stop();
  }
  control_->stop();
  control_->runLocked([this](Locked& locked) {
    for (const auto& watch : watches_) {
      watch->unwatch(locked);
    }
  });
  waitUntilTold();
  gate_->close();
  gate_->wait();
}

// Waits, because a task of the runner may still bring a frame to the Handler
// and then tell the Handler of the end of the connection.
void UcxContext::waitUntilTold() {
  const int64_t deadline = monotonicMilliseconds() + kDrainMilliseconds;
  // A thread that is inside of such a task would wait for itself.
  while (untold_.load() != 0 && !gate_->holdsThisThread() &&
         monotonicMilliseconds() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

} // namespace torch_rpc_ext::transport::ucx
