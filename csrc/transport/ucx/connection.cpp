#include "transport/ucx/connection.h"

#include "base/boundary.h"
#include "transport/ucx/context.h"
#include "transport/ucx/endpoint_transports.h"
#include "transport/ucx/from_ucx.h"
#include "transport/ucx/status.h"

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
    uint64_t localToken)
    : context_(std::move(context)), localToken_(localToken) {}

std::shared_ptr<UcxConnection> UcxConnection::create(
    std::shared_ptr<UcxContext> context,
    uint64_t localToken) {
  std::shared_ptr<UcxConnection> connection(
      new UcxConnection(std::move(context), localToken));
  connection->watch_ = std::make_shared<PeerWatch>(
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
              deferEnd(locked, std::move(frame), error);
            });
      });
}

void UcxConnection::probe() {
  worker().post([self = shared_from_this()](Locked& locked) {
    if (self->isOpen()) {
      // Any message would do: a peer that does not know the token says so, see
      // EndedConnections::onMessage().
      self->tell(locked, {.kind = FrameKind::kDone, .transfer = 0}, {});
    }
  });
}

Distance UcxConnection::distance() const {
  if (!isOpen()) {
    return Distance::kUnknown;
  }
  return bulk_->sharesMemory() ? Distance::kSharesMemory : Distance::kApart;
}

PathInfo UcxConnection::path() const {
  PathInfo info;
  worker().runLocked([&](Locked&) {
    for (const auto& [name, device] : transportsOf(endpoint_)) {
      info.control +=
          (info.control.empty() ? "" : ", ") + name + " (" + device + ")";
    }
    if (info.control.empty()) {
      return;
    }
    if (agreed_.channel != nullptr) {
      info.control += ", encrypted (AES-256-GCM)";
    }
    if (bulk_ != nullptr) {
      const bulk::Peer& peer = bulk_->peer();
      info.bulk = peer.readable()    ? "shared memory, else cma"
          : peer.reachesUsAt.empty() ? "ucx: " + info.control
                                     : "lanes: " + info.control;
      info.why = peer.readable() ? "" : "no cma: " + peer.whyUnreadable;
    }
  });
  return info;
}

void UcxConnection::sendOrKeep(Locked& locked, Unsent& frame) {
  if (isOpen()) {
    sendNow(locked, std::move(frame));
  } else if (closed()) {
    deferUnsent(locked, std::move(frame), ending());
  } else {
    unsent_.push_back(std::move(frame));
  }
}

void UcxConnection::sendNow(Locked& locked, Unsent frame) {
  if (!frame.bulk.empty() || frame.head.size() > kMaxEagerBytes) {
    bulk_->send(
        locked,
        std::move(frame.head),
        std::move(frame.bulk),
        std::move(frame.callback));
    return;
  }
  sendActive(locked, {.token = agreed_.peer.token}, std::move(frame.head));
  deferCallback(locked, std::move(frame.callback), {});
}

// The frame is over. Its bulk may hold the last reference to a tensor, so the
// frame is dropped without the lock.
void UcxConnection::deferEnd(
    Locked& locked,
    Unsent frame,
    const base::Error& error) {
  locked.defer([frame = std::move(frame), error] {
    if (frame.callback) {
      frame.callback(error);
    }
  });
}

void UcxConnection::deferUnsent(
    Locked& locked,
    Unsent frame,
    base::Error error) {
  deferEnd(locked, std::move(frame), base::notSent(std::move(error)));
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

void UcxConnection::tell(
    Locked& locked,
    FrameHeader header,
    base::Buffer data) {
  header.token = agreed_.peer.token;
  sendActive(locked, header, std::move(data));
}

void UcxConnection::sendActive(
    Locked& locked,
    FrameHeader header,
    base::Buffer data) {
  if (endpoint_ == nullptr) {
    return;
  }
  if (bulk_ != nullptr) {
    header.acknowledged = bulk_->nextAcknowledgement(locked);
  }
  if (agreed_.channel != nullptr) {
    auto sealed = agreed_.channel->seal(
        agreed_.peer.token, header, {data.data(), data.size()});
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

void UcxConnection::acknowledgeSoon(Locked& locked) {
  context_->acknowledgeSoon(locked, shared_from_this());
}

void UcxConnection::acknowledge(Locked& locked) {
  if (bulk_ != nullptr) {
    bulk_->acknowledge(locked);
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

} // namespace torch_rpc_ext::transport::ucx
