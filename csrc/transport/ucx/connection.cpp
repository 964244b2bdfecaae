#include "transport/ucx/connection.h"

#include "base/boundary.h"
#include "transport/ucx/context.h"
#include "transport/ucx/status.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// What an active message needs until UCX has let go of it.
struct ActiveSend {
  std::shared_ptr<UcxConnection> connection;
  base::Buffer data;
};

void onActiveSent(void* request, ucs_status_t status, void* argument) noexcept {
  const std::unique_ptr<ActiveSend> send(static_cast<ActiveSend*>(argument));
  ucp_request_free(request);
  UcxConnection& connection = *send->connection;
  base::guarded(
      base::Boundary::kSent,
      [&] { connection.onSent(status); },
      [&](const base::Error& error) { connection.fail(error); });
}

} // namespace

UcxConnection::UcxConnection(
    std::shared_ptr<UcxContext> context,
    uint64_t localToken,
    bool initiator)
    : context_(std::move(context)),
      localToken_(localToken),
      initiator_(initiator),
      transfers_(context_->worker()) {}

std::shared_ptr<UcxConnection> UcxConnection::create(
    std::shared_ptr<UcxContext> context,
    uint64_t localToken,
    bool initiator) {
  std::shared_ptr<UcxConnection> connection(
      new UcxConnection(std::move(context), localToken, initiator));
  connection->watch_ = std::make_shared<PeerWatch>(
      connection->context_->sharedWorker(),
      "connection " + std::to_string(localToken & 0xffff),
      [weak = std::weak_ptr(connection)](PeerState before) {
        if (const auto self = weak.lock()) {
          self->onPeerChanged(before);
        }
      });
  return connection;
}

// ---- any thread ------------------------------------------------------------

void UcxConnection::send(
    base::Buffer head,
    std::vector<BulkSpan> bulk,
    Callback callback) {
  context_->worker().post(
      base::makeTask([self = shared_from_this(),
                      frame = Unsent{
                          std::move(head),
                          std::move(bulk),
                          std::move(callback)}]() mutable {
        base::guarded(
            base::Boundary::kSend,
            [&] { self->sendOrKeep(frame); },
            [&](const base::Error& error) {
              self->fail(error);
              self->deferCallback(std::move(frame.callback), error);
            });
      }));
}

bool UcxConnection::sharesMemory() const {
  // Who can read the peer's memory can be read by it, too: the same user, the
  // same namespaces. Both are written before the state.
  return open() && exposesMemory_ && cmaUsable_;
}

bool UcxConnection::sendsPieces() const {
  return open() && !sharesMemory();
}

PathInfo UcxConnection::path() const {
  PathInfo info;
  context_->worker().runLocked([&] {
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
    if (encrypted()) {
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
      context_->handler().onClosed(shared_from_this(), ending());
    };
    base::guarded(base::Boundary::kDelivery, tell, [&](const base::Error&) {
      tell(); // else its calls would not end
    });
  }
}

// ---- under the lock --------------------------------------------------------

void UcxConnection::deferCallback(Callback callback, base::Error error) {
  if (callback) {
    context_->worker().defer(
        base::makeTask([callback = std::move(callback),
                        error = std::move(error)] { callback(error); }));
  }
}

void UcxConnection::sendActive(FrameHeader header, base::Buffer data) {
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
      fail(sealed.error());
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
  params.cb.send = onActiveSent;
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
    return; // already gone
  }
  if (UCS_PTR_IS_ERR(request)) {
    onSent(UCS_PTR_STATUS(request));
    return;
  }
  (void)send.release(); // onActiveSent owns it now
  context_->worker().needProgress();
}

void UcxConnection::acknowledge() {
  acknowledgesSoon_ = false;
  acknowledgements_.insert(
      acknowledgements_.end(), adopted_.begin(), adopted_.end());
  adopted_.clear();
  while (!acknowledgements_.empty() && open()) {
    const uint64_t transfer = acknowledgements_.back();
    acknowledgements_.pop_back();
    sendActive(
        {.kind = FrameKind::kDone, .token = peer_.token, .transfer = transfer},
        {});
  }
}

void UcxConnection::onSent(ucs_status_t status) {
  if (status != UCS_OK && status != UCS_ERR_CANCELED) {
    // Before the answer to the handshake, what fails is to get there.
    hear(
        PeerWord::kPathLost,
        toError(
            status,
            peer() == PeerState::kConnecting ? "cannot connect" : "sending"));
  }
}

void UcxConnection::sendOrKeep(Unsent& frame) {
  if (open()) {
    sendNow(std::move(frame));
  } else if (closed()) {
    deferCallback(std::move(frame.callback), ending());
  } else {
    unsent_.push_back(std::move(frame));
  }
}

void UcxConnection::sendNow(Unsent frame) {
  FrameHeader header;
  header.token = peer_.token;
  header.count = static_cast<uint32_t>(frame.bulk.size());
  const size_t tableBytes = frame.bulk.size() * sizeof(BulkEntry);
  const bool big = tableBytes + frame.head.size() > kMaxEagerBytes;
  if (frame.bulk.empty() && !big) {
    sendActive(header, std::move(frame.head));
    deferCallback(std::move(frame.callback), {});
    return;
  }
  const auto entryOf = [this](const BulkSpan& span) {
    BulkEntry entry{.size = span.size};
    // What is being filled has to be asked for.
    if (exposesMemory_ && span.filling == nullptr) {
      entry.address = reinterpret_cast<uint64_t>(span.data);
      if (span.region.id != 0) {
        entry.region = span.region.id;
        entry.fd =
            span.returned ? kReturned : static_cast<uint64_t>(span.region.fd);
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
    // The frame itself becomes the first span.
    header.kind = FrameKind::kBigFrame;
    bigFrame = std::move(data);
    const BulkEntry entry =
        entryOf(BulkSpan{{bigFrame.data(), bigFrame.size()}});
    data = base::Buffer(sizeof(entry));
    std::memcpy(data.data(), &entry, sizeof(entry));
  }
  header.transfer = transfers_.add(
      std::move(bigFrame), frame.bulk, std::move(frame.callback));
  sendActive(header, std::move(data));
}

} // namespace torch_rpc_ext::transport::ucx
