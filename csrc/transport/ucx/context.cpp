#include "transport/ucx/context.h"

#include "base/log.h"
#include "transport/ucx/from_ucx.h"
#include "transport/ucx/ports.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// How long stop() waits in each of its steps: for peers to finish reading, for
// sent messages to leave, for the Handler to hear of the ends. Bounded, because
// a peer that does not read must not keep this process from ending.
constexpr std::chrono::milliseconds kDrainTime{1000};
// The longest time between our reading a peer's memory and our telling the peer
// that the memory is its own again.
constexpr std::chrono::milliseconds kAcknowledgeAfter{5};
// How many handshakes may be under way at once that peers have begun, which is
// more than any group needs. The limit is for a stranger who repeats first
// messages that he has recorded. Beyond the limit no refusal is sent, because
// that would take an endpoint.
constexpr size_t kMaxAccepting = 4096;
// When a process is killed, the kernel first resets its sockets and then
// reports its end. A doubted peer's process has this time to be seen to end.
// The kernel needs microseconds, and longer only if the core is busy.
constexpr std::chrono::seconds kDoubtTime{2};

// Opens UCX, and makes a worker.
template <typename AnyWorker>
base::Result<std::shared_ptr<AnyWorker>> openWorker(
    const Options& options,
    std::shared_ptr<base::Gate> gate) {
  auto ucp = UcpContext::create(options);
  if (!ucp.ok()) {
    return ucp.error();
  }
  return AnyWorker::create(std::move(ucp.value()), std::move(gate));
}

// As openWorker(), at a free port of options.ports. UCX is given one port at a
// time: of several, UCX would try one after the other at random, and never end
// if all are taken.
template <typename AnyWorker>
base::Result<std::shared_ptr<AnyWorker>> openWorkerAtPort(
    Options options,
    const std::shared_ptr<base::Gate>& gate) {
  const auto [first, last] = options.ports;
  // Workers that start at the same time begin at different ports.
  const int count = last - first + 1;
  const int begin = getpid() % count;
  for (int i = 0; i < count; ++i) {
    const auto port = static_cast<uint16_t>(first + (begin + i) % count);
    if (!isFree(port)) {
      continue;
    }
    options.ports = {port, port};
    auto worker = openWorker<AnyWorker>(options, gate);
    // If the port is not free any more, another process has been faster.
    if (worker.ok() || isFree(port)) {
      return worker;
    }
  }
  return base::Error{
      base::ErrorKind::kOverloaded,
      "fewer than two of the ports " + std::to_string(first) + " to " +
          std::to_string(last) + " (port_range) are free"};
}

} // namespace

base::Result<std::shared_ptr<UcxContext>> UcxContext::create(
    const Options& options) {
  const auto gate = std::make_shared<base::Gate>();
  const bool anyPort = options.ports.first == 0;
  auto control = anyPort ? openWorker<ControlWorker>(options, gate)
                         : openWorkerAtPort<ControlWorker>(options, gate);
  if (!control.ok()) {
    return control.error();
  }
  bulk::MakeWorker makeBulkWorker;
  if (anyPort) {
    makeBulkWorker = [ucp = control.value()->context(), gate] {
      return BulkWorker::create(ucp, gate);
    };
  } else {
    // If this worker were made later, the first large tensor could find that
    // the range has no port left.
    auto made = openWorkerAtPort<BulkWorker>(options, gate);
    if (!made.ok()) {
      return made.error();
    }
    makeBulkWorker = [made = std::move(made)] { return made; };
  }
  return std::shared_ptr<UcxContext>(new UcxContext(
      options, gate, std::move(control.value()), std::move(makeBulkWorker)));
}

UcxContext::UcxContext(
    Options options,
    std::shared_ptr<base::Gate> gate,
    std::shared_ptr<ControlWorker> control,
    bulk::MakeWorker makeBulkWorker)
    : options_(std::move(options)),
      gate_(std::move(gate)),
      control_(std::move(control)),
      workerAddress_(control_->address()),
      doorToken_(randomToken()),
      bulk_(
          std::move(makeBulkWorker),
          gate_,
          {options_.ports, options_.keepaliveSeconds}) {}

std::string UcxContext::address() const {
  return encodeAddress({doorToken_, process(), workerAddress_});
}

void UcxContext::start(
    base::Poller& poller,
    base::TaskRunner& runner,
    Handler& handler) {
  poller_ = &poller;
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
  slots_.emplace(poller, runner, [this] {
    control_->progressSoon();
    bulk_.progressSoon();
  });
  bulk_.start(poller, runner, [this] { slots_->workerAdded(); });
  openings_.emplace(
      poller,
      *control_,
      kHandshakeTime,
      [](Locked& locked, const auto& connection) {
        connection->onHandshakeLate(locked);
      });
  doubts_.emplace(
      poller,
      *control_,
      kDoubtTime,
      [](Locked& locked, const auto& connection) {
        connection->onDoubtOver(locked);
      });
  acknowledgements_.emplace(
      poller,
      *control_,
      kAcknowledgeAfter,
      [](Locked& locked, const auto& connection) {
        connection->acknowledge(locked);
      });
  control_->start(poller, /*main=*/true);
}

ConnectionPtr UcxContext::connect(
    const std::string& address,
    const std::string& hello) {
  std::shared_ptr<UcxConnection> connection;
  // This thread waits for the lock only to enter the connection into the map.
  // The endpoint is opened by a posted operation, which reports its failure
  // through onClosed().
  control_->runLocked(
      [&](Locked& locked) { connection = makeConnection(locked); });
  control_->post([this, connection, address, hello](Locked& locked) {
    if (stopped_.load()) {
      connection->fail(locked, transportEnded());
      return;
    }
    auto parsed = parseAddress(address);
    if (!parsed.ok()) {
      connection->fail(locked, parsed.error());
      return;
    }
    if (groupKey_.empty()) {
      connection->fail(
          locked, {base::ErrorKind::kRefused, "this worker has no secret"});
      return;
    }
    connection->open(locked, parsed.value(), hello);
  });
  return connection;
}

std::shared_ptr<UcxConnection> UcxContext::makeConnection(Locked& locked) {
  const uint64_t token = randomToken();
  auto connection = UcxConnection::create(shared_from_this(), token);
  untold_.fetch_add(1);
  connections_.emplace(token, connection);
  openings_->add(locked, connection);
  return connection;
}

void UcxContext::setSecret(const std::string& secret) {
  control_->runLocked([&](Locked&) { groupKey_ = ucx::groupKey(secret); });
}

std::shared_ptr<UcxConnection> UcxContext::find(Locked&, uint64_t token) const {
  auto it = connections_.find(token);
  return it == connections_.end() ? nullptr : it->second;
}

void UcxContext::onMessage(
    Locked& locked,
    base::ConstSpan headerBytes,
    base::ConstSpan data) {
  auto parsed = parseHeader(headerBytes);
  if (!parsed.ok()) {
    base::log(base::LogLevel::kInfo, "dropped: " + parsed.error().message);
    return;
  }
  const FrameHeader& header = parsed.value();
  if (header.kind == FrameKind::kOpen) {
    onOpen(locked, {header, data});
  } else if (const auto connection = find(locked, header.token)) {
    connection->onMessage(locked, {header, data});
  } else { // for a connection that has ended here, or from a stranger
    ended_.onMessage(locked, {header, data});
  }
}

void UcxContext::onLostMessage(
    Locked& locked,
    base::ConstSpan headerBytes,
    base::ConstSpan data,
    const base::Error& error) {
  auto parsed = parseHeader(headerBytes);
  if (!parsed.ok()) {
    return;
  }
  switch (parsed.value().kind) {
    case FrameKind::kOpen:
    case FrameKind::kOpened:
    case FrameKind::kConfirm:
      // A second attempt. If this message were lost, the connection would never
      // open, and the peer would only notice after its long wait for the
      // handshake.
      onMessage(locked, headerBytes, data);
      break;
    default:
      if (const auto connection = find(locked, parsed.value().token)) {
        connection->fail(locked, error);
      }
  }
}

void UcxContext::onOpen(Locked& locked, const Message& message) {
  const FrameHeader& header = message.header;
  const auto refuse = [this](const std::string& why) {
    refused("refused a connection: the other end " + why);
  };
  if (header.token != doorToken_ || groupKey_.empty()) {
    refuse("does not know this worker's address token");
    return;
  }
  if (header.version != kProtocolVersion) {
    refuse(
        "speaks version " + std::to_string(header.version) +
        " of the torch_rpc_ext protocol, this worker version " +
        std::to_string(kProtocolVersion) +
        ": install the same torch_rpc_ext everywhere");
    return;
  }
  auto opening = HandshakeSession::check(groupKey_, header.token, message.data);
  if (!opening.ok()) {
    refuse(opening.error().message);
    return;
  }
  if (accepting_ >= kMaxAccepting) {
    refuse("is one of too many at once");
    return;
  }
  const auto connection = makeConnection(locked);
  std::string introduction;
  withHandler([&](Handler& handler) { introduction = handler.introduction(); });
  connection->accept(locked, std::move(opening.value()), introduction);
  if (stopped_.load()) {
    // stop() may have closed all connections for the last time, and the worker
    // still makes progress for a moment.
    connection->closeNow(locked);
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
  bulk_.close();
  acknowledgements_->stop();
  openings_->stop();
  doubts_->stop();
  slots_->stop();
  control_->runLocked([this](Locked& locked) {
    // A copy, because a connection that turns out to be broken is forgotten.
    for (const auto& [token, connection] : std::unordered_map(connections_)) {
      connection->acknowledge(locked);
    }
    ended_.stop(locked);
  });
  // Peers that still read this process's memory get a moment to finish.
  control_->progressUntil(
      [this](Locked& locked) {
        return std::none_of(
            connections_.begin(), connections_.end(), [&](const auto& entry) {
              return entry.second->lends(locked);
            });
      },
      kDrainTime);
  control_->progressUntil(
      [this](Locked& locked) {
        // In each round, because a peer may connect meanwhile.
        for (const auto& [token, connection] :
             std::exchange(connections_, {})) {
          connection->closeNow(locked);
        }
        return closing_.none(locked);
      },
      kDrainTime);
  control_->runLocked([this](Locked& locked) {
    for (const auto& [endpoint, connection] : closing_.takeFlushing(locked)) {
      connection->closeByForce(locked, endpoint);
    }
  });
  control_->progressUntil(
      [this](Locked& locked) { return closing_.none(locked); }, kDrainTime);
  bulk_.stop();
  control_->stop();
  control_->runLocked([this](Locked& locked) { ended_.unwatch(locked); });
  waitUntilTold();
  gate_->close();
  gate_->wait();
}

// Waits, because a task of the runner may still bring a frame to the Handler
// and then tell the Handler of the end of the connection.
void UcxContext::waitUntilTold() {
  const auto deadline = std::chrono::steady_clock::now() + kDrainTime;
  // A thread that is inside of such a task would wait for itself.
  while (untold_.load() != 0 && !gate_->holdsThisThread() &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

} // namespace torch_rpc_ext::transport::ucx
