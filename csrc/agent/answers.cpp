// How answers to requests are sent.

#include "agent/answers.h"

#include "agent/call_label.h"
#include "agent/failure_message.h"
#include "agent/held_message.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

using transport::Distance;

namespace rpc = torch::distributed::rpc;

Answers::Answers(
    const AgentOptions& options,
    Executor& executor,
    metrics::Counters& counters,
    ReceiveMemory& memory,
    const Group& group,
    UnreadRRefs& unreadRRefs,
    Devices& devices)
    : options_(options),
      executor_(executor),
      counters_(counters),
      memory_(memory),
      group_(group),
      unreadRRefs_(unreadRRefs),
      devices_(devices) {}

void Answers::send(
    const Asker& asker,
    c10::intrusive_ptr<rpc::Message> message) {
  const auto& connection = asker.connection;
  const EncodeOptions options = encodeOptions(asker);
  const bool fromDevices = device::anyOn(message->tensors());
  std::string caller;
  device::Route route{.request = false};
  if (fromDevices || devices_.tables().any()) {
    caller = group_.peers().nameOf(connection.get());
    route.receiver = &caller;
    route.map = devices_.tables().mapBackTo(caller);
  }
  if (fromDevices) {
    sendFromDevices(connection, options, message, route);
    return;
  }
  auto encoded = encode(message, options, route);
  if (!encoded.ok()) {
    unreadRRefs_.undelivered(*message);
    sendError(connection, asker.callId, encoded.error());
    return;
  }
  auto rrefs = payloadWithRRefs(*message);
  message.reset();
  sendFrame(
      connection, asker.callId, std::move(encoded.value()), std::move(rrefs));
}

void Answers::sendError(
    const transport::ConnectionPtr& connection,
    uint64_t callId,
    const base::Error& why) {
  const auto message = makeFailure(
      why.kind,
      "worker \"" + group_.self().name_ +
          "\" could not send its result: " + why.message);
  auto encoded = encode(message, {callId, wire::CallKind::kResponse});
  if (encoded.ok()) { // always, because the message has no tensors
    sendFrame(
        connection, callId, std::move(encoded.value()), /*rrefs=*/nullptr);
  }
}

EncodeOptions Answers::encodeOptions(const Asker& asker) {
  const Distance distance = asker.connection->distance();
  EncodeOptions options{
      .callId = asker.callId,
      .kind = wire::CallKind::kResponse,
      .checked = asker.checked || options_.integrity,
      .inPieces = distance == Distance::kApart,
      .cache = memory_.cache().get()};
  if (distance == Distance::kSameProcess) {
    return options;
  }
  if (asker.dtype) {
    options.dtype = *asker.dtype;
  } else if (options_.wireDtypes.any()) {
    options.dtype =
        options_.wireDtypes.of(group_.peers().nameOf(asker.connection.get()));
  }
  if (options.dtype != wire::WireDtype::kFloat32) {
    memory_.trimLater(); // narrowed copies take memory from the cache
  }
  return options;
}

void Answers::sendFromDevices(
    const transport::ConnectionPtr& connection,
    const EncodeOptions& options,
    const c10::intrusive_ptr<rpc::Message>& message,
    const device::Route& route) {
  const std::shared_ptr<const std::string> rrefs = payloadWithRRefs(*message);
  const auto ready = [this, callId = options.callId, connection, rrefs](
                         base::Result<Encoded> encoded) {
    if (encoded.ok()) {
      sendFrame(connection, callId, std::move(encoded.value()), rrefs);
    } else {
      release(rrefs);
      sendError(connection, callId, encoded.error());
    }
  };
  if (base::Error error =
          devices_.encode(message, options, route, connection, ready)) {
    ready(std::move(error));
  }
}

void Answers::release(const std::shared_ptr<const std::string>& rrefs) {
  if (rrefs != nullptr) {
    unreadRRefs_.undelivered(std::make_unique<std::string>(*rrefs));
  }
}

void Answers::sendFrame(
    const transport::ConnectionPtr& connection,
    uint64_t callId,
    Encoded encoded,
    std::shared_ptr<const std::string> rrefs) {
  if (encoded.bulk.empty() ||
      connection->distance() != Distance::kSharesMemory ||
      encoded.giveAway(*memory_.cache(), connection)) {
    sendFrameNow(connection, callId, std::move(encoded), std::move(rrefs));
    return;
  }
  memory_.trimLater();
  memory_.lender().lend(
      std::move(encoded),
      [this, callId, connection, rrefs = std::move(rrefs)](Encoded lent) {
        sendFrameNow(connection, callId, std::move(lent), rrefs);
      });
}

void Answers::sendFrameNow(
    const transport::ConnectionPtr& connection,
    uint64_t callId,
    Encoded encoded,
    std::shared_ptr<const std::string> rrefs) {
  metrics::add(counters_.bytesSent, encoded.totalBytes);
  counters_.messageBytes.add(encoded.totalBytes);
  Admission::Untaken untaken;
  if (encoded.borrowsBulk()) {
    untaken =
        memory_.admission().answering(connection.get(), encoded.totalBytes);
  }
  auto held = hold(encoded, executor_);
  base::Buffer head = std::move(encoded.head);
  std::vector<transport::BulkSpan> bulk = std::move(encoded.bulk);
  connection->send(
      std::move(head),
      std::move(bulk),
      [this,
       callId,
       // Weak, because the transport keeps the callback with the connection.
       caller = std::weak_ptr(connection),
       rrefs = std::move(rrefs),
       untaken = std::move(untaken),
       held = std::move(held)](const base::Error& error) {
        if (held != nullptr && held->parcel != nullptr) {
          held->parcel->sent(error);
        }
        const auto to = error ? caller.lock() : nullptr;
        const bool isOpen = to != nullptr && !to->closed();
        if (meansUnread(error, isOpen)) {
          release(rrefs);
        }
        if (!isOpen) {
          return;
        }
        // The caller did not take the answer. Either the answer is too large
        // for the caller, whose transport refuses such a message before the
        // caller knows whose answer it is: then this error ends the call. (An
        // error has no bulk, so it is not refused.) Or the call has timed out:
        // then the caller drops the error.
        executor_.submit(base::makeTask([this, callId, to, error] {
          sendError(to, callId, error);
        }));
      });
}

} // namespace torch_rpc_ext::agent
