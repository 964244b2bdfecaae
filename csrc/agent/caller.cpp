// The calling side: sends requests and completes the futures of their answers.

#include "agent/caller.h"

#include "agent/call_label.h"
#include "agent/damage.h"
#include "agent/held_message.h"
#include "base/boundary.h"

#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

namespace torch_rpc_ext::agent {

using transport::Distance;

namespace rpc = torch::distributed::rpc;

namespace {

// The time-out that the frame carries: ms for which the caller will still wait,
// at least 1; 0 for no time-out, or for one that does not fit.
uint32_t timeLeft(const PendingCall& call) {
  if (call.timeout.count() <= 0 || call.timeout.count() > UINT32_MAX) {
    return 0;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(
      call.sentAt + call.timeout - PendingCall::Clock::now());
  return static_cast<uint32_t>(std::max<int64_t>(left.count(), 1));
}

} // namespace

Caller::Caller(
    const AgentOptions& options,
    Executor& executor,
    metrics::Counters& counters,
    ReceiveMemory& memory,
    Group& group,
    Devices& devices,
    UnreadRRefs& unreadRRefs,
    const AgentHooks& hooks)
    : options_(options),
      executor_(executor),
      counters_(counters),
      memory_(memory),
      group_(group),
      devices_(devices),
      unreadRRefs_(unreadRRefs),
      calls_(options, executor, counters, group.peers(), unreadRRefs, hooks),
      wait_(executor, calls_.pending(), hooks.checkInterrupt) {}

c10::intrusive_ptr<rpc::JitFuture> Caller::send(
    const WorkerInfo& to,
    const c10::intrusive_ptr<Message>& message,
    std::chrono::milliseconds timeout,
    const rpc::DeviceMap& deviceMap) {
  PendingCall call = newCall(to, *message, timeout);
  auto future = call.future;
  const base::Error ownerDied = group_.ownerDied(*message, to.id_);
  if (message->type() == rpc::MessageType::RREF_USER_DELETE &&
      (ownerDied || group_.peers().isGone(to.id_))) {
    // The value went with its owner. If this message failed, torch would send
    // it again and again for 9 s, and a shutdown would wait that long.
    future->markCompleted(
        c10::IValue(rpc::RRefAck().toMessage()),
        std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>{});
    return future;
  }
  calls_.begin(call);
  if (ownerDied) {
    calls_.fail(std::move(call), ownerDied);
    return future;
  }
  if (base::Error error = calls_.limit(call, *message)) {
    calls_.fail(std::move(call), error);
    return future;
  }
  const uint32_t left = timeLeft(call);
  const bool holdsRRefs = call.rrefs != nullptr;
  if (base::Error error = calls_.pending().add(call)) {
    calls_.fail(std::move(call), error);
    return future;
  }
  const uint64_t id = call.id;

  const device::Route route = routeTo(to, deviceMap);
  const bool toSelf = to.id_ == group_.self().id_;
  const bool waits = AnswerWait::isAwaited(*message);
  base::Error error;
  std::optional<Executor::Leader> leader;
  try {
    const transport::ConnectionPtr connection =
        group_.peers().connection(to.id_);
    const EncodeOptions options = encodeOptions(id, left, to.name_, connection);
    if (isUserCall(message->type())) {
      wait_.begin(id);
    }
    if (device::anyOn(message->tensors())) {
      error = sendFromDevices(options, message, route, connection);
    } else {
      auto encoded = encode(message, options, route);
      error = encoded.ok() ? base::Error() : encoded.error();
      if (!error) {
        encoded.value().holdsRRefs = holdsRRefs;
        const AnswerWait::Sending sending(
            id, encoded.value().totalBytes, toSelf, waits, leader);
        sendFrame(id, std::move(encoded.value()), connection);
      }
    }
  } catch (const std::exception&) {
    calls_.withdraw(id);
    throw;
  }
  if (error) {
    // A call with tensors that cannot be sent throws here, as upstream's does.
    calls_.withdraw(id);
    throw std::runtime_error(error.message);
  }
  if (waits) {
    try {
      wait_.afterSending(id, leader, *future);
    } catch (...) {
      releaseUnread(*future);
      throw;
    }
  }
  return future;
}

PendingCall Caller::newCall(
    const WorkerInfo& to,
    const Message& message,
    std::chrono::milliseconds timeout) const {
  PendingCall call;
  call.future = c10::make_intrusive<rpc::JitFuture>(
      at::AnyClassType::get(), devices_.used());
  call.worker = to.name_;
  call.to = to.id_;
  call.label = labelOf(message);
  call.createsRRef = createsRRef(message);
  call.rrefs = payloadWithRRefs(message);
  call.timeout = timeout;
  call.sentAt = PendingCall::Clock::now();
  return call;
}

device::Route Caller::routeTo(
    const WorkerInfo& to,
    const rpc::DeviceMap& deviceMap) const {
  device::Route route{.receiver = &to.name_};
  if (!deviceMap.empty()) {
    route.map = &deviceMap;
  } else if (devices_.tables().any()) {
    route.map = devices_.tables().mapTo(to.name_);
  }
  return route;
}

void Caller::releaseUnread(rpc::JitFuture& future) {
  future.addCallback([this](rpc::JitFuture& done) {
    if (!done.hasError()) {
      unreadRRefs_.unread(*done.value().toCustomClass<Message>());
    }
  });
}

c10::intrusive_ptr<rpc::JitFuture> Caller::ask(
    const WorkerInfo& to,
    const c10::intrusive_ptr<Message>& message,
    std::string label) {
  PendingCall call;
  call.future = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
  call.worker = to.name_;
  call.label = std::move(label);
  call.sentAt = PendingCall::Clock::now();
  call.counted = false;
  auto future = call.future;
  if (base::Error error = calls_.pending().add(call)) {
    calls_.fail(std::move(call), error);
    return future;
  }
  const uint64_t id = call.id;
  auto encoded = encode(message, {id, wire::CallKind::kRequest, UINT64_MAX});
  try {
    sendFrame(
        id, std::move(encoded.value()), group_.peers().connection(to.id_));
  } catch (const std::exception&) {
    calls_.withdraw(id);
    throw;
  }
  return future;
}

EncodeOptions Caller::encodeOptions(
    uint64_t callId,
    uint32_t timeout,
    const std::string& worker,
    const transport::ConnectionPtr& connection) {
  const Distance distance = connection->distance();
  EncodeOptions options{
      .callId = callId,
      .kind = wire::CallKind::kRequest,
      .answer = callDtype(),
      .timeout = timeout,
      .checked = options_.integrity,
      .inPieces = distance == Distance::kApart,
      .cache = memory_.cache().get()};
  // In a call to this worker itself no bytes travel, so there is nothing to
  // narrow.
  if (distance != Distance::kSameProcess) {
    options.dtype = options.answer.value_or(options_.wireDtypes.of(worker));
  }
  if (options.dtype != wire::WireDtype::kFloat32) {
    memory_.trimLater(); // narrowed copies take memory from the cache
  }
  return options;
}

void Caller::sendFrame(
    uint64_t callId,
    Encoded encoded,
    const transport::ConnectionPtr& connection) {
  if (encoded.bulk.empty() ||
      connection->distance() != Distance::kSharesMemory) {
    sendFrameNow(callId, std::move(encoded), connection);
    return;
  }
  memory_.trimLater();
  memory_.lender().lend(
      std::move(encoded), [this, callId, connection](Encoded lent) {
        if (calls_.pending().contains(callId)) {
          sendFrameNow(callId, std::move(lent), connection);
        } else {
          // The call has timed out. This thread may serve the network, so what
          // the message holds may have to die on another thread.
          hold(lent, executor_);
        }
      });
}

void Caller::sendFrameNow(
    uint64_t callId,
    Encoded encoded,
    const transport::ConnectionPtr& connection) {
  UntakenPtr untaken;
  if (encoded.borrowsBulk()) {
    untaken = std::make_shared<std::atomic<uint64_t>>(encoded.totalBytes);
  }
  // The callback below holds the memory that `bulk` points into until the peer
  // has taken the bulk, even after the call has timed out. If the call is not
  // sent, because it has timed out already, `held` drops the memory here.
  auto held = hold(encoded, executor_);
  const bool holdsRRefs = encoded.holdsRRefs;
  if (!calls_.setSent(callId, connection, untaken) && holdsRRefs) {
    return; // the call has timed out, and its RRefs have been released
  }
  metrics::add(counters_.bytesSent, encoded.totalBytes);
  counters_.messageBytes.add(encoded.totalBytes);
  base::Buffer head = std::move(encoded.head);
  std::vector<transport::BulkSpan> bulk = std::move(encoded.bulk);
  // Before the call is sent: the answer may arrive before this thread runs
  // again, and would then wake a thread of the pool.
  wait_.leadFor(callId);
  connection->send(
      std::move(head),
      std::move(bulk),
      [this,
       callId,
       untaken,
       holdsRRefs,
       via = std::weak_ptr(connection),
       held = std::move(held)](const base::Error& error) {
        if (untaken != nullptr) {
          untaken->store(0);
        }
        if (held != nullptr && held->parcel != nullptr) {
          held->parcel->sent(error);
        }
        if (holdsRRefs) {
          calls_.sendEnded(callId, via, error);
        }
        if (!error) {
          return;
        }
        auto call = calls_.pending().take(callId);
        if (!call) {
          return;
        }
        if (AnswerWait::isBeingSent(callId)) {
          // send() has not returned: nobody has the future, so fail() runs no
          // user code. And upstream's RRefs expect such an error before send()
          // returns.
          calls_.fail(std::move(*call), error);
        } else {
          calls_.failLater(std::move(*call), error);
        }
      });
}

c10::intrusive_ptr<rpc::JitFuture> Caller::release(
    const WorkerInfo& owner,
    const c10::intrusive_ptr<Message>& message,
    std::chrono::milliseconds timeout) {
  try {
    return send(owner, message, timeout, /*deviceMap=*/{});
  } catch (const std::exception&) {
    if (group_.membership().find(owner.id_) != nullptr) {
      throw;
    }
  }
  auto released = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
  released->markCompleted(c10::IValue(rpc::RRefAck().toMessage()));
  return released;
}

base::Error Caller::sendFromDevices(
    const EncodeOptions& options,
    const c10::intrusive_ptr<Message>& message,
    const device::Route& route,
    const transport::ConnectionPtr& connection) {
  return devices_.encode(
      message,
      options,
      route,
      connection,
      [this, callId = options.callId, connection](
          base::Result<Encoded> encoded) {
        if (!encoded.ok()) {
          if (auto call = calls_.pending().take(callId)) {
            calls_.failLater(std::move(*call), encoded.error());
          }
        } else if (calls_.pending().contains(callId)) { // else it has timed out
          sendFrame(callId, std::move(encoded.value()), connection);
        }
      });
}

void Caller::answered(ArrivalPtr arrival) {
  // Taken here and not in complete(): an answer that has arrived stays valid
  // even if the connection ends in the next moment.
  arrival->call = calls_.pending().take(arrival->header().callId);
  if (!arrival->call || arrival->call->holdsRRefs) {
    hearWhetherRead(arrival->header());
  }
  if (arrival->call) {
    completeLater(std::move(arrival));
  } else if (arrival->mayPassRRefs()) { // the call has timed out
    executor_.submitCompletion(
        base::makeTask(
            [this, arrival = std::move(arrival)] { tooLate(arrival); }));
  }
}

void Caller::tooLate(const ArrivalPtr& arrival) {
  if (devices_.decode(arrival, [this, arrival] { tooLate(arrival); })) {
    releaseUnread(*arrival);
  }
}

void Caller::releaseUnread(Arrival& arrival) {
  if (meansUnread(arrival.error, /*isOpen=*/true)) {
    return; // the callee hears that the bulk was refused, and releases them
  }
  if (arrival.message->ok()) {
    unreadRRefs_.unread(*arrival.message->value());
  } else if (arrival.incoming != nullptr) { // which has the bytes of the frame
    const auto& failure = arrival.message->error();
    if (const auto message = arrival.decoder->withoutTensors(failure)) {
      unreadRRefs_.unread(*message);
    }
  }
}

void Caller::completeLater(ArrivalPtr arrival) {
  const auto mailbox = arrival->call->mailbox;
  base::TaskPtr task = base::makeTask([this, arrival = std::move(arrival)] {
    base::guarded(
        base::Boundary::kCompletion,
        [&] { complete(arrival); },
        [&](const base::Error& error) {
          // A call that has ended has no future any more.
          if (arrival->call->future != nullptr) {
            calls_.fail(std::move(*arrival->call), error);
          }
        });
  });
  if (mailbox == nullptr || !mailbox->put(task)) {
    executor_.submitCompletion(std::move(task));
  }
}

void Caller::complete(const ArrivalPtr& arrival) {
  if (!devices_.decode(arrival, [this, arrival] { completeLater(arrival); })) {
    return;
  }
  PendingCall& call = *arrival->call;
  auto& message = *arrival->message;
  if (!message.ok()) {
    logDamage(call.worker, message.error());
    calls_.fail(std::move(call), message.error());
    releaseUnread(*arrival);
    return;
  }
  // The future records the current streams, so that its users wait for the work
  // queued there.
  const device::StreamScope scope(arrival->streams);
  calls_.finish(call, std::move(message.value()));
}

} // namespace torch_rpc_ext::agent
