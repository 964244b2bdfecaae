#include "transport/ucx/context.h"

#include "base/boundary.h"
#include "base/log.h"
#include "memory/buffer_cache.h"
#include "transport/ucx/incoming.h"
#include "transport/ucx/status.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// How long stop() waits for what was sent to leave, in milliseconds. A peer
// that does not read must not keep a process from ending.
constexpr int kDrainMilliseconds = 1000;
// How long a peer waits at most to have its memory back after we have read it.
constexpr std::chrono::milliseconds kAcknowledgeAfter{5};
constexpr size_t kMaxBroken = 64;
constexpr size_t kMaxParked = 64;
// How long a handshake may take: on a loaded machine a peer may be slow, and a
// stranger gets no further than this.
constexpr std::chrono::seconds kHandshakeTime{30};
// What the kernel has, at most, between resetting the sockets of a process that
// is killed and telling that it has ended. It takes microseconds, and longer
// only where other processes are on the core.
constexpr std::chrono::seconds kDoubtTime{2};

// The kind of error that a kDone or kAbort names.
base::ErrorKind toKind(uint32_t number) {
  return number != 0 &&
          number <= static_cast<uint32_t>(base::ErrorKind::kCorrupted)
      ? static_cast<base::ErrorKind>(number)
      : base::ErrorKind::kRefused;
}

} // namespace

base::Result<std::shared_ptr<UcxContext>> UcxContext::create(
    const Options& options) {
  auto ucp = UcpContext::create(options);
  if (!ucp.ok()) {
    return ucp.error();
  }
  auto worker = Worker::create(ucp.value());
  if (!worker.ok()) {
    return worker.error();
  }
  std::shared_ptr<Worker> bulk;
  if (options.ports.first != 0) {
    // Else the first large tensor would find that the range has no port left.
    auto created = Worker::create(ucp.value());
    if (!created.ok()) {
      return created.error();
    }
    bulk = std::move(created.value());
  }
  return std::shared_ptr<UcxContext>(
      new UcxContext(options, ucp.value(), worker.value(), std::move(bulk)));
}

UcxContext::UcxContext(
    Options options,
    std::shared_ptr<UcpContext> ucp,
    std::shared_ptr<Worker> control,
    std::shared_ptr<Worker> bulk)
    : options_(std::move(options)),
      ucp_(std::move(ucp)),
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
  params.cb = &UcxContext::onActiveMessage;
  params.arg = this;
  control_->runLocked(
      [&] { ucp_worker_set_am_recv_handler(control_->get(), &params); });
  slots_.emplace(poller, runner, [this] { progressSoon(); });
  control_->start(poller, /*main=*/true);
  acknowledgeTimer_.emplace(poller, [this] {
    control_->post(base::makeTask([this] { acknowledgeNow(); }));
  });
  openings_.emplace(
      poller, *control_, kHandshakeTime, [](const auto& connection) {
        if (connection->peer() == PeerState::kConnecting) {
          connection->hear(
              PeerWord::kPathLost,
              {base::ErrorKind::kPeerLost,
               "no answer to the introduction within " +
                   std::to_string(kHandshakeTime.count()) +
                   " s (a worker that hangs, or knows another secret)"});
        }
      });
  doubts_.emplace(poller, *control_, kDoubtTime, [](const auto& connection) {
    connection->onDoubtOver();
  });
}

ConnectionPtr UcxContext::connect(
    const std::string& address,
    const std::string& hello) {
  std::shared_ptr<UcxConnection> connection;
  // Under the lock only for the map; the endpoint is opened by an operation,
  // whose failure comes back through onClosed().
  control_->runLocked([&] { connection = makeConnection(/*initiator=*/true); });
  control_->post(base::makeTask([this, connection, address, hello] {
    if (stopped_.load()) {
      connection->fail({base::ErrorKind::kShutDown, "the transport has ended"});
      return;
    }
    auto parsed = parseAddress(address);
    if (!parsed.ok()) {
      connection->fail(parsed.error());
      return;
    }
    const ContextAddress& peer = parsed.value();
    base::Error error = groupKey_.empty()
        ? base::Error{base::ErrorKind::kRefused, "this worker has no secret"}
        : connection->open(peer, hello);
    if (error) {
      connection->fail(std::move(error));
    }
  }));
  return connection;
}

base::Result<std::shared_ptr<BulkChannel>> UcxContext::bulk() {
  std::lock_guard lock(bulkMutex_);
  if (bulk_ == nullptr) {
    if (stopped_.load()) {
      return base::Error{base::ErrorKind::kShutDown, "the transport has ended"};
    }
    if (bulkWorker_ == nullptr) {
      auto created = Worker::create(ucp_);
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

void UcxContext::acknowledgeSoon(std::shared_ptr<UcxConnection> connection) {
  if (acknowledging_.empty()) {
    acknowledgeTimer_->set(base::Timer::Clock::now() + kAcknowledgeAfter);
  }
  acknowledging_.push_back(std::move(connection));
}

void UcxContext::acknowledgeNow() {
  for (auto& connection : std::exchange(acknowledging_, {})) {
    connection->acknowledge();
  }
}

void UcxContext::keep(std::shared_ptr<PeerWatch> watch) {
  std::erase_if(watches_, [](const auto& former) { return !former->holds(); });
  watches_.push_back(std::move(watch));
}

void UcxContext::forget(
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

bool UcxContext::park(std::shared_ptr<UcxConnection> connection) {
  if (stopped_.load()) {
    return false;
  }
  parked_.push_back(std::move(connection));
  if (parked_.size() > kMaxParked) {
    unpark(*parked_.front());
  }
  return true;
}

void UcxContext::unpark(const UcxConnection& connection) {
  const auto it =
      std::find_if(parked_.begin(), parked_.end(), [&](const auto& parked) {
        return parked.get() == &connection;
      });
  if (it != parked_.end()) {
    const auto parked = std::move(*it);
    parked_.erase(it);
    parked->leavePark();
  }
}

void UcxContext::stop() {
  if (stopped_.exchange(true) || poller_ == nullptr) {
    return;
  }
  acknowledgeTimer_->stop();
  openings_->stop();
  doubts_->stop();
  slots_->stop();
  control_->runLocked([this] {
    acknowledgeNow();
    broken_.clear();
    while (!parked_.empty()) {
      unpark(*parked_.front());
    }
  });
  // Peers that still read our memory get a moment to end.
  control_->progressUntil(
      [this] {
        return std::none_of(
            connections_.begin(), connections_.end(), [](const auto& entry) {
              return entry.second->lending();
            });
      },
      kDrainMilliseconds);
  std::vector<std::shared_ptr<UcxConnection>> connections;
  control_->runLocked([&] {
    for (auto& [token, connection] : connections_) {
      connections.push_back(connection);
    }
  });
  for (auto& connection : connections) {
    connection->close();
  }
  control_->progressUntil(
      [this] { return connections_.empty() && closing_ == 0; },
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
  control_->runLocked([this] {
    for (const auto& watch : watches_) {
      watch->unwatch();
    }
  });
}

// ---- under the lock --------------------------------------------------------

ucs_status_t UcxContext::onActiveMessage(
    void* self,
    const void* header,
    size_t headerLength,
    void* data,
    size_t length,
    const ucp_am_recv_param_t* param) noexcept {
  // We send nothing by UCX's rendezvous: whoever does is no peer of ours.
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
    auto* const context = static_cast<UcxContext*>(self);
    base::guarded(
        base::Boundary::kMessage,
        [&] { context->onMessage({header, headerLength}, {data, length}); },
        [&](const base::Error& error) {
          context->onLostMessage({header, headerLength}, {data, length}, error);
        });
  }
  return UCS_OK;
}

std::shared_ptr<UcxConnection> UcxContext::find(uint64_t token) const {
  auto it = connections_.find(token);
  return it == connections_.end() ? nullptr : it->second;
}

void UcxContext::onMessage(base::ConstSpan headerBytes, base::ConstSpan data) {
  auto parsed = parseHeader(headerBytes);
  if (!parsed.ok()) {
    base::log(base::LogLevel::kInfo, "dropped: " + parsed.error().message);
    return;
  }
  const FrameHeader& header = parsed.value();
  if (header.kind == FrameKind::kOpen) {
    onOpen(header, data);
    return;
  }
  auto connection = find(header.token);
  if (!connection) {
    onLateMessage(header);
    return;
  }
  switch (header.kind) {
    case FrameKind::kOpened:
    case FrameKind::kConfirm:
    case FrameKind::kRefused:
      onHandshake(connection, header, data);
      break;
    default:
      if (!connection->established()) {
        // UCX does not promise the order of messages, least of all while it is
        // connecting: what overtook the handshake waits for its end.
        connection->keepEarly(header, data);
      } else {
        onFrameOf(connection, header, data);
      }
  }
}

// What took it has thrown.
void UcxContext::onLostMessage(
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
      // Of a connection that is not open the peer would hear nothing until it
      // has waited for long.
      onMessage(headerBytes, data);
      break;
    default:
      if (const auto connection = find(parsed.value().token)) {
        connection->fail(error);
      }
  }
}

void UcxContext::tellThatItBroke(uint64_t localToken) {
  const auto it =
      std::find_if(broken_.begin(), broken_.end(), [&](const auto& entry) {
        return entry.first == localToken;
      });
  if (it != broken_.end() && it->second->tellThatItBroke()) {
    broken_.erase(it);
  }
}

// Of a connection that has ended here, or a stranger's.
void UcxContext::onLateMessage(const FrameHeader& header) {
  if (header.kind == FrameKind::kClose) {
    std::erase_if(broken_, [&](const auto& entry) {
      return entry.first == header.token; // it knows
    });
  } else {
    tellThatItBroke(header.token);
  }
}

void UcxContext::onFrameOf(
    const std::shared_ptr<UcxConnection>& connection,
    const FrameHeader& header,
    base::ConstSpan data) {
  if (!connection->encrypted() && header.kind != FrameKind::kSealed) {
    onConnectionMessage(connection, header, data);
    return;
  }
  auto opened = header.kind == FrameKind::kSealed
      ? connection->unseal(header, data)
      : base::Error{
            base::ErrorKind::kInvalid,
            "a plain message on an encrypted connection"};
  if (!opened.ok()) {
    // Not the end of the connection: a stranger could end it then.
    refusals_(base::LogLevel::kWarning, "dropped: " + opened.error().message);
    return;
  }
  onConnectionMessage(connection, opened.value().header, opened.value().data());
}

void UcxContext::onConnectionMessage(
    const std::shared_ptr<UcxConnection>& connection,
    const FrameHeader& header,
    base::ConstSpan data) {
  if (header.acknowledged != 0) {
    connection->onDone(header.acknowledged, {});
  }
  switch (header.kind) {
    case FrameKind::kFrame:
      onFrame(connection, header, data);
      break;
    case FrameKind::kBigFrame:
      onBigFrame(connection, header, data);
      break;
    case FrameKind::kPull:
      connection->onPull(header.transfer, data);
      break;
    case FrameKind::kDone:
      connection->onDone(
          header.transfer,
          header.count == 0 ? base::Error{}
                            : base::Error{toKind(header.count), toText(data)});
      break;
    case FrameKind::kAbort:
      connection->onAbort(
          header.transfer,
          {toKind(header.count), "the sender gave it up: " + toText(data)});
      break;
    case FrameKind::kClose:
      if (header.count == 0) {
        connection->hear(
            PeerWord::kGoodbye,
            {base::ErrorKind::kShutDown, "the peer shut down"});
      } else {
        connection->hear(
            PeerWord::kBrokeThere,
            {base::ErrorKind::kPeerLost,
             "the connection broke at the other end"});
      }
      break;
    case FrameKind::kOpen:
    case FrameKind::kOpened:
    case FrameKind::kRefused:
    case FrameKind::kConfirm:
    case FrameKind::kSealed:
      break; // not inside of another
  }
}

void UcxContext::onFrame(
    const std::shared_ptr<UcxConnection>& connection,
    const FrameHeader& header,
    base::ConstSpan data) {
  base::Buffer bytes(data.size);
  if (data.size != 0) {
    std::memcpy(bytes.data(), data.data, data.size);
  }
  auto incoming = makeIncoming(
      connection,
      header.transfer,
      /*firstSpan=*/0,
      header.count,
      std::move(bytes),
      options_.maxFrameBytes);
  if (!incoming.ok()) {
    connection->done(header.transfer, 0, incoming.error());
    return;
  }
  connection->deliveryBegins();
  control_->defer(
      base::makeTask(
          [this, connection, incoming = std::move(incoming.value())]() mutable {
            deliver(connection, std::move(incoming));
          }));
}

void UcxContext::deliver(
    const std::shared_ptr<UcxConnection>& connection,
    std::unique_ptr<Incoming> incoming) {
  base::guarded(
      base::Boundary::kDelivery,
      [&] { handler_->onFrame(connection, std::move(incoming)); },
      [&](const base::Error& error) {
        control_->post(
            base::makeTask([connection, error] { connection->fail(error); }));
      });
  connection->deliveryEnds();
}

void UcxContext::onBigFrame(
    const std::shared_ptr<UcxConnection>& connection,
    const FrameHeader& header,
    base::ConstSpan data) {
  auto entries = parseBulkEntries(data, 1);
  if (!entries.ok()) {
    connection->done(header.transfer, 0, entries.error());
    return;
  }
  const uint64_t size = entries.value()[0].size;
  const uint64_t limit = options_.maxFrameBytes != 0 ? options_.maxFrameBytes
                                                     : memory::physicalMemory();
  if (size > limit) {
    connection->done(
        header.transfer,
        /*bytes=*/0,
        {base::ErrorKind::kRefused,
         "the message has more than " + std::to_string(size) +
             " bytes, the receiver takes at most " + std::to_string(limit) +
             (options_.maxFrameBytes != 0 ? " (option max_message_bytes)"
                                          : " (its memory)")});
    return;
  }
  // Not on the thread that polls: it may be much memory.
  connection->deliveryBegins();
  runner_->submit(
      base::makeTask([this, connection, header, entries = entries.value()] {
        fetchBigFrame(connection, header, entries);
      }));
}

void UcxContext::fetchBigFrame(
    const std::shared_ptr<UcxConnection>& connection,
    const FrameHeader& header,
    const std::vector<BulkEntry>& entries) {
  auto bytes = std::make_shared<base::Buffer>();
  try {
    *bytes = base::Buffer(entries[0].size);
  } catch (const std::bad_alloc&) {
    connection->done(
        header.transfer,
        /*bytes=*/0,
        {base::ErrorKind::kOverloaded,
         "the receiver has no memory for a message of " +
             std::to_string(entries[0].size) + " bytes"});
    connection->deliveryEnds();
    return;
  }
  connection->fetch(
      header.transfer,
      /*first=*/0,
      entries,
      {{bytes->data(), bytes->size()}},
      [this, connection, header, bytes](const base::Error& error) {
        auto incoming = error ? base::Result<std::unique_ptr<Incoming>>(error)
                              : makeIncoming(
                                    connection,
                                    header.transfer,
                                    /*firstSpan=*/1,
                                    header.count,
                                    std::move(*bytes),
                                    options_.maxFrameBytes);
        if (incoming.ok()) {
          deliver(connection, std::move(incoming.value()));
        } else {
          connection->done(header.transfer, 0, incoming.error());
          connection->deliveryEnds();
        }
      },
      /*arrived=*/nullptr);
}

} // namespace torch_rpc_ext::transport::ucx
