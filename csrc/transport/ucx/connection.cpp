#include "transport/ucx/connection.h"

#include "base/boundary.h"
#include "transport/ucx/context.h"
#include "transport/ucx/from_ucx.h"
#include "transport/ucx/status.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

// Keeps what an active message needs until UCX has sent it.
struct UcxConnection::ActiveSend {
  std::shared_ptr<UcxConnection> connection;
  base::Buffer data;

  ControlWorker& worker() const {
    return connection->worker();
  }
  void left(Locked& locked, ucs_status_t status) {
    connection->onSent(locked, status);
  }
  void failed(Locked& locked, const base::Error& error) {
    connection->fail(locked, error);
  }
};

UcxConnection::UcxConnection(
    std::shared_ptr<UcxContext> context,
    uint64_t localToken,
    bool initiator)
    : context_(std::move(context)),
      localToken_(localToken),
      initiator_(initiator) {}

std::shared_ptr<UcxConnection> UcxConnection::create(
    std::shared_ptr<UcxContext> context,
    uint64_t localToken,
    bool initiator) {
  std::shared_ptr<UcxConnection> connection(
      new UcxConnection(std::move(context), localToken, initiator));
  connection->watch_ = std::make_shared<PeerWatch>(
      connection->context_->sharedWorker(),
      "connection " + std::to_string(localToken & 0xffff),
      [weak = std::weak_ptr(connection)](Locked& locked, PeerState before) {
        if (const auto self = weak.lock()) {
          self->onPeerChanged(locked, before);
        }
      });
  return connection;
}

ControlWorker& UcxConnection::worker() const {
  return context_->worker();
}

void UcxConnection::send(
    base::Buffer head,
    std::vector<BulkSpan> bulk,
    Callback callback) {
  worker().post(
      [self = shared_from_this(),
       frame = Unsent{std::move(head), std::move(bulk), std::move(callback)}](
          Locked& locked) mutable {
        base::guarded(
            base::Boundary::kSend,
            [&] { self->sendOrKeep(locked, frame); },
            [&](const base::Error& error) {
              self->fail(locked, error);
              self->deferCallback(locked, std::move(frame.callback), error);
            });
      });
}

bool UcxConnection::sharesMemory() const {
  // If this process can read the peer's memory, the peer is taken to be able to
  // read ours, because both have the same user and namespaces. exposesMemory_
  // and cmaUsable_ are written before the state, so this needs no lock.
  return open() && exposesMemory_ && cmaUsable_;
}

bool UcxConnection::sendsPieces() const {
  return open() && !sharesMemory();
}

PathInfo UcxConnection::path() const {
  PathInfo info;
  worker().runLocked([&](Locked& locked) {
    if (endpoint_ == nullptr) {
      return;
    }
    std::vector<ucp_transport_entry_t> entries(8);
    ucp_ep_attr_t attr{};
    attr.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
    attr.transports.entries = entries.data();
    attr.transports.num_entries = entries.size();
    attr.transports.entry_size = sizeof(ucp_transport_entry_t);
    if (ucp_ep_query(endpoint_, &attr) != UCS_OK) {
      return;
    }
    std::vector<std::string> names;
    for (unsigned i = 0; i < attr.transports.num_entries; ++i) {
      std::string name = std::string(entries[i].transport_name) + " (" +
          entries[i].device_name + ")";
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        names.push_back(std::move(name));
      }
    }
    for (const auto& name : names) {
      info.control += (info.control.empty() ? "" : ", ") + name;
    }
    if (encrypted(locked)) {
      info.control += ", encrypted (AES-256-GCM)";
    }
    info.bulk = cmaUsable_ ? "shared memory, else cma" : "ucx: " + info.control;
    info.why = cmaUsable_ ? "" : "no cma: " + whyNoCma_;
  });
  return info;
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

void UcxConnection::deferCallback(
    Locked& locked,
    Callback callback,
    base::Error error) {
  if (callback) {
    locked.defer([callback = std::move(callback), error = std::move(error)] {
      callback(error);
    });
  }
}

void UcxConnection::sendActive(
    Locked& locked,
    FrameHeader header,
    base::Buffer data) {
  if (endpoint_ == nullptr) {
    return;
  }
  if (!acknowledgements_.empty()) {
    header.acknowledged = acknowledgements_.back();
    acknowledgements_.pop_back();
  }
  if (channel_ != nullptr) {
    auto sealed =
        channel_->seal(peer_.token, header, {data.data(), data.size()});
    if (!sealed.ok()) {
      fail(locked, sealed.error());
      return;
    }
    header = sealed.value().header;
    data = std::move(sealed.value().data);
  }
  auto send = std::make_unique<ActiveSend>(
      ActiveSend{shared_from_this(), std::move(data)});
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
      UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  params.cb.send =
      FromUcx<base::Boundary::kSent, &ActiveSend::left, &ActiveSend::failed>::
          sentLast;
  params.user_data = send.get();
  params.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
  void* request = ucp_am_send_nbx(
      endpoint_,
      kActiveMessageId,
      &header,
      sizeof(header),
      send->data.data(),
      send->data.size(),
      &params);
  if (request == nullptr) {
    return; // the message has already left
  }
  if (UCS_PTR_IS_ERR(request)) {
    onSent(locked, UCS_PTR_STATUS(request));
    return;
  }
  (void)send.release(); // sentLast() deletes this object
  locked.needProgress();
}

void UcxConnection::acknowledge(Locked& locked) {
  acknowledgesSoon_ = false;
  acknowledgements_.insert(
      acknowledgements_.end(), adopted_.begin(), adopted_.end());
  adopted_.clear();
  while (!acknowledgements_.empty() && open()) {
    const uint64_t transfer = acknowledgements_.back();
    acknowledgements_.pop_back();
    sendActive(
        locked,
        {.kind = FrameKind::kDone, .token = peer_.token, .transfer = transfer},
        {});
  }
}

void UcxConnection::onSent(Locked& locked, ucs_status_t status) {
  if (status != UCS_OK && status != UCS_ERR_CANCELED) {
    // If a message fails to leave before the answer to the handshake, the peer
    // could not be reached at all.
    hear(
        locked,
        PeerWord::kPathLost,
        toError(
            status,
            peer() == PeerState::kConnecting ? "cannot connect" : "sending"));
  }
}

void UcxConnection::sendOrKeep(Locked& locked, Unsent& frame) {
  if (open()) {
    sendNow(locked, std::move(frame));
  } else if (closed()) {
    deferCallback(locked, std::move(frame.callback), ending());
  } else {
    unsent_.push_back(std::move(frame));
  }
}

void UcxConnection::sendNow(Locked& locked, Unsent frame) {
  FrameHeader header;
  header.token = peer_.token;
  header.count = static_cast<uint32_t>(frame.bulk.size());
  const size_t tableBytes = frame.bulk.size() * sizeof(BulkEntry);
  const bool big = tableBytes + frame.head.size() > kMaxEagerBytes;
  if (frame.bulk.empty() && !big) {
    sendActive(locked, header, std::move(frame.head));
    deferCallback(locked, std::move(frame.callback), {});
    return;
  }
  const auto entryOf = [this](const BulkSpan& span) {
    BulkEntry entry{.size = span.size};
    // The peer must not read a span that is still being filled: without an
    // address here, the peer has to ask for the span with kPull.
    if (exposesMemory_ && span.filling == nullptr) {
      entry.address = reinterpret_cast<uint64_t>(span.data);
      if (span.region.id != 0) {
        entry.region = span.region.id;
        entry.fd =
            span.returned ? kReturned : static_cast<uint64_t>(span.region.fd);
        entry.fd |= span.isCommon ? kCommon : 0;
      }
    }
    return entry;
  };
  base::Buffer data(tableBytes + frame.head.size());
  for (size_t i = 0; i < frame.bulk.size(); ++i) {
    const BulkEntry entry = entryOf(frame.bulk[i]);
    std::memcpy(data.data() + i * sizeof(entry), &entry, sizeof(entry));
  }
  if (frame.head.size() != 0) {
    std::memcpy(data.data() + tableBytes, frame.head.data(), frame.head.size());
  }
  base::Buffer bigFrame;
  if (big) {
    // The frame itself becomes the first span, which the peer fetches.
    header.kind = FrameKind::kBigFrame;
    bigFrame = std::move(data);
    const BulkEntry entry =
        entryOf(BulkSpan{{bigFrame.data(), bigFrame.size()}});
    data = base::Buffer(sizeof(entry));
    std::memcpy(data.data(), &entry, sizeof(entry));
  }
  header.transfer = transfers_.add(
      locked, std::move(bigFrame), frame.bulk, std::move(frame.callback));
  sendActive(locked, header, std::move(data));
}

} // namespace torch_rpc_ext::transport::ucx
