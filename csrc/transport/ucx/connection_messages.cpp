// UcxConnection, the way of a message that arrives, from UCX to the Handler.

#include "base/boundary.h"
#include "memory/buffer_cache.h"
#include "transport/ucx/connection.h"
#include "transport/ucx/context.h"
#include "transport/ucx/incoming.h"

#include <chrono>
#include <new>
#include <string>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// How much may arrive before the peer has confirmed who it is. A sender that
// exceeds these limits is no peer of ours.
constexpr size_t kMaxEarlyMessages = 4096;
constexpr size_t kMaxEarlyBytes = 16u << 20;

} // namespace

// A frame on its way to the Handler, which hears of the connection's end only
// after the frame. If an exception ends the way, the destructor ends the
// delivery.
class UcxConnection::Delivery {
 public:
  explicit Delivery(std::shared_ptr<UcxConnection> connection)
      : connection_(std::move(connection)) {
    connection_->deliveries_.fetch_add(1);
  }
  ~Delivery() {
    end();
  }
  Delivery(Delivery&&) noexcept = default;
  Delivery& operator=(Delivery&&) = delete;

  void carry(std::unique_ptr<Incoming> incoming) {
    connection_->deliver(std::move(incoming));
    end();
  }
  void end() {
    if (const auto connection = std::exchange(connection_, nullptr)) {
      connection->deliveryEnds();
    }
  }

 private:
  std::shared_ptr<UcxConnection> connection_;
};

void UcxConnection::onMessage(Locked& locked, const Message& message) {
  heard_ = std::chrono::steady_clock::now();
  switch (message.header.kind) {
    case FrameKind::kOpened:
    case FrameKind::kConfirm:
    case FrameKind::kRefused:
      onHandshake(locked, message);
      break;
    default:
      if (bulk_ == nullptr) {
        // UCX does not promise to keep messages in order, least of all while an
        // endpoint connects. So a message that has overtaken the end of the
        // handshake waits for that end.
        keepEarly(locked, message);
      } else {
        onSealedOrPlain(locked, message);
      }
  }
}

void UcxConnection::keepEarly(Locked& locked, const Message& message) {
  earlyBytes_ += message.data.size;
  if (early_.size() >= kMaxEarlyMessages || earlyBytes_ > kMaxEarlyBytes) {
    fail(
        locked,
        {base::ErrorKind::kInvalid, "the peer speaks before it is known"});
    return;
  }
  early_.emplace_back(message.header, base::copyOf(message.data));
}

void UcxConnection::onSealedOrPlain(Locked& locked, const Message& message) {
  const bool sealed = message.header.kind == FrameKind::kSealed;
  SecureChannel* const channel = agreed_.channel.get();
  if (channel == nullptr && !sealed) {
    onPlain(locked, message);
    return;
  }
  auto opened = channel != nullptr && sealed
      ? channel->open(message.header, message.data)
      : base::Error{
            base::ErrorKind::kInvalid,
            sealed ? "an encrypted message on a plain connection"
                   : "a plain message on an encrypted connection"};
  if (!opened.ok()) {
    // The connection does not end, because otherwise a stranger could end it by
    // sending such a message.
    context_->refused("dropped: " + opened.error().message);
    return;
  }
  onPlain(locked, {opened.value().header, opened.value().data()});
}

void UcxConnection::onPlain(Locked& locked, const Message& message) {
  const FrameHeader& header = message.header;
  if (header.acknowledged != 0) {
    bulk_->onAcknowledged(locked, header.acknowledged);
  }
  switch (header.kind) {
    case FrameKind::kFrame:
      onFrame(locked, message);
      break;
    case FrameKind::kBigFrame:
      onBigFrame(locked, message);
      break;
    case FrameKind::kPull:
    case FrameKind::kDone:
    case FrameKind::kAbort:
      bulk_->onMessage(locked, message);
      break;
    case FrameKind::kClose:
      if (header.count == 0) {
        hear(
            locked,
            PeerWord::kGoodbye,
            {base::ErrorKind::kShutDown, "the peer shut down"});
      } else {
        hear(
            locked,
            PeerWord::kBrokeThere,
            {base::ErrorKind::kPeerLost,
             "the connection broke at the other end"});
      }
      break;
    case FrameKind::kRefused:
      // The accepter refuses what the opener has confirmed.
      fail(locked, {base::ErrorKind::kRefused, toText(message.data)});
      break;
    case FrameKind::kOpen:
    case FrameKind::kOpened:
    case FrameKind::kConfirm:
    case FrameKind::kSealed:
      break; // not allowed inside of a sealed message
  }
}

void UcxConnection::onFrame(Locked& locked, const Message& message) {
  auto incoming = makeIncoming(
      locked,
      bulk_->keep(),
      message.header.transfer,
      message.header.count,
      message.data,
      context_->options().maxFrameBytes);
  if (!incoming.ok()) {
    bulk_->done(message.header.transfer, 0, incoming.error());
    return;
  }
  locked.defer([delivery = Delivery(shared_from_this()),
                incoming = std::move(incoming.value())]() mutable {
    delivery.carry(std::move(incoming));
  });
}

void UcxConnection::deliver(std::unique_ptr<Incoming> incoming) {
  guardDelivery([&] {
    context_->withHandler([&](Handler& handler) {
      handler.onFrame(shared_from_this(), std::move(incoming));
    });
  });
}

template <typename F>
void UcxConnection::guardDelivery(F&& carry) {
  base::guarded(
      base::Boundary::kDelivery,
      std::forward<F>(carry),
      [&](const base::Error& error) {
        worker().post([self = shared_from_this(), error](Locked& locked) {
          self->fail(locked, error);
        });
      });
}

void UcxConnection::deliveryEnds() {
  if (deliveries_.fetch_sub(1) == 1) {
    const auto tell = [this] {
      context_->withHandler([this](Handler& handler) {
        handler.onClosed(shared_from_this(), ending());
      });
    };
    base::guarded(base::Boundary::kDelivery, tell, [&](const base::Error&) {
      tell(); // a second attempt, or calls to the peer would not end
    });
    context_->connectionTold();
  }
}

void UcxConnection::onBigFrame(Locked&, const Message& message) {
  const FrameHeader& header = message.header;
  auto entries = parseBulkEntries(message.data, 1);
  if (!entries.ok()) {
    bulk_->done(header.transfer, 0, entries.error());
    return;
  }
  const uint64_t size = entries.value()[0].size;
  const uint64_t most = context_->options().maxFrameBytes;
  const uint64_t limit = most != 0 ? most : memory::physicalMemory();
  if (size > limit) {
    bulk_->done(
        header.transfer,
        /*bytes=*/0,
        {base::ErrorKind::kRefused,
         "the message has more than " + std::to_string(size) +
             " bytes, the receiver takes at most " + std::to_string(limit) +
             (most != 0 ? " (option max_message_bytes)" : " (its memory)")});
    return;
  }
  std::shared_ptr<void> ahead;
  context_->withHandler([&](Handler& handler) {
    ahead = handler.onFrameAhead(shared_from_this());
  });
  // Not on the thread that polls, because allocating much memory takes long.
  context_->bulk().runner().submit(
      base::makeTask([self = shared_from_this(),
                      delivery = std::make_shared<Delivery>(shared_from_this()),
                      header,
                      entries = entries.value(),
                      ahead = std::move(ahead)] {
        self->guardDelivery(
            [&] { self->fetchBigFrame(delivery, header, entries, ahead); });
      }));
}

void UcxConnection::fetchBigFrame(
    const std::shared_ptr<Delivery>& delivery,
    const FrameHeader& header,
    const std::vector<BulkEntry>& entries,
    std::shared_ptr<void> ahead) {
  auto bytes = std::make_shared<base::Buffer>();
  try {
    *bytes = base::Buffer(entries[0].size);
  } catch (const std::bad_alloc&) {
    bulk_->done(
        header.transfer,
        /*bytes=*/0,
        {base::ErrorKind::kOverloaded,
         "the receiver has no memory for a message of " +
             std::to_string(entries[0].size) + " bytes"});
    return;
  }
  bulk_->fetch(
      {.transfer = header.transfer,
       .from = entries,
       .into = {{bytes->data(), bytes->size()}},
       .callback = [self = shared_from_this(),
                    delivery,
                    header,
                    bytes,
                    ahead =
                        std::move(ahead)](const base::Error& error) mutable {
         auto incoming = error ? base::Result<std::unique_ptr<Incoming>>(error)
                               : makeBigIncoming(
                                     self->bulk_->keep(),
                                     header.transfer,
                                     header.count,
                                     std::move(*bytes),
                                     self->context_->options().maxFrameBytes);
         if (incoming.ok()) {
           incoming.value()->ahead = std::move(ahead);
           delivery->carry(std::move(incoming.value()));
         } else {
           self->bulk_->done(header.transfer, 0, incoming.error());
           delivery->end();
         }
       }});
}

} // namespace torch_rpc_ext::transport::ucx
