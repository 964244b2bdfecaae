// UcxContext, the way of a message that arrives, from UCX to the Handler.

#include "base/boundary.h"
#include "base/log.h"
#include "memory/buffer_cache.h"
#include "transport/ucx/context.h"
#include "transport/ucx/incoming.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// The kind of error that a kDone or a kAbort carries as a number.
base::ErrorKind toKind(uint32_t number) {
  return number != 0 &&
          number <= static_cast<uint32_t>(base::ErrorKind::kCorrupted)
      ? static_cast<base::ErrorKind>(number)
      : base::ErrorKind::kRefused;
}

} // namespace

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
    onOpen(locked, header, data);
    return;
  }
  auto connection = find(locked, header.token);
  if (!connection) {
    onLateMessage(locked, header);
    return;
  }
  switch (header.kind) {
    case FrameKind::kOpened:
    case FrameKind::kConfirm:
    case FrameKind::kRefused:
      onHandshake(locked, connection, header, data);
      break;
    default:
      if (!connection->established(locked)) {
        // UCX does not promise to keep messages in order, least of all while an
        // endpoint connects. So a message that has overtaken the end of the
        // handshake waits for that end.
        connection->keepEarly(locked, header, data);
      } else {
        onFrameOf(locked, connection, header, data);
      }
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

void UcxContext::tellThatItBroke(Locked& locked, uint64_t localToken) {
  const auto it =
      std::find_if(broken_.begin(), broken_.end(), [&](const auto& entry) {
        return entry.first == localToken;
      });
  if (it != broken_.end() && it->second->tellThatItBroke(locked)) {
    broken_.erase(it);
  }
}

void UcxContext::onLateMessage(Locked& locked, const FrameHeader& header) {
  if (header.kind == FrameKind::kClose) {
    std::erase_if(broken_, [&](const auto& entry) {
      return entry.first == header.token; // the peer knows
    });
  } else {
    tellThatItBroke(locked, header.token);
  }
}

void UcxContext::onFrameOf(
    Locked& locked,
    const std::shared_ptr<UcxConnection>& connection,
    const FrameHeader& header,
    base::ConstSpan data) {
  if (!connection->encrypted(locked) && header.kind != FrameKind::kSealed) {
    onConnectionMessage(locked, connection, header, data);
    return;
  }
  auto opened = header.kind == FrameKind::kSealed
      ? connection->unseal(locked, header, data)
      : base::Error{
            base::ErrorKind::kInvalid,
            "a plain message on an encrypted connection"};
  if (!opened.ok()) {
    // The connection does not end, because otherwise a stranger could end it by
    // sending such a message.
    refusals_(base::LogLevel::kWarning, "dropped: " + opened.error().message);
    return;
  }
  onConnectionMessage(
      locked, connection, opened.value().header, opened.value().data());
}

void UcxContext::onConnectionMessage(
    Locked& locked,
    const std::shared_ptr<UcxConnection>& connection,
    const FrameHeader& header,
    base::ConstSpan data) {
  if (header.acknowledged != 0) {
    connection->onDone(locked, header.acknowledged, {});
  }
  switch (header.kind) {
    case FrameKind::kFrame:
      onFrame(locked, connection, header, data);
      break;
    case FrameKind::kBigFrame:
      onBigFrame(locked, connection, header, data);
      break;
    case FrameKind::kPull:
      connection->onPull(locked, header.transfer, data);
      break;
    case FrameKind::kDone:
      connection->onDone(
          locked,
          header.transfer,
          header.count == 0 ? base::Error{}
                            : base::Error{toKind(header.count), toText(data)});
      break;
    case FrameKind::kAbort:
      connection->onAbort(
          locked,
          header.transfer,
          {toKind(header.count), "the sender gave it up: " + toText(data)});
      break;
    case FrameKind::kClose:
      if (header.count == 0) {
        connection->hear(
            locked,
            PeerWord::kGoodbye,
            {base::ErrorKind::kShutDown, "the peer shut down"});
      } else {
        connection->hear(
            locked,
            PeerWord::kBrokeThere,
            {base::ErrorKind::kPeerLost,
             "the connection broke at the other end"});
      }
      break;
    case FrameKind::kRefused:
      // The accepter refuses what the opener has confirmed.
      connection->fail(locked, {base::ErrorKind::kRefused, toText(data)});
      break;
    case FrameKind::kOpen:
    case FrameKind::kOpened:
    case FrameKind::kConfirm:
    case FrameKind::kSealed:
      break; // not allowed inside of a sealed message
  }
}

void UcxContext::onFrame(
    Locked& locked,
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
  locked.defer(
      [this, connection, incoming = std::move(incoming.value())]() mutable {
        deliver(connection, std::move(incoming));
      });
}

void UcxContext::deliver(
    const std::shared_ptr<UcxConnection>& connection,
    std::unique_ptr<Incoming> incoming) {
  base::guarded(
      base::Boundary::kDelivery,
      [&] {
        withHandler([&](Handler& handler) {
          handler.onFrame(connection, std::move(incoming));
        });
      },
      [&](const base::Error& error) {
        control_->post([connection, error](Locked& locked) {
          connection->fail(locked, error);
        });
      });
  connection->deliveryEnds();
}

void UcxContext::onBigFrame(
    Locked&,
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
  // Not on the thread that polls, because allocating much memory takes long.
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
