// UcxConnection, its end: news about the peer, and what follows from the news.

#include "transport/ucx/connection.h"
#include "transport/ucx/context.h"
#include "transport/ucx/from_ucx.h"
#include "transport/ucx/status.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

// Keeps a connection while UCX closes its endpoint.
struct UcxConnection::Closing {
  std::shared_ptr<UcxConnection> connection;

  ControlWorker& worker() const {
    return connection->worker();
  }
  void closed(Locked& locked, ucs_status_t /*status*/) {
    connection->context_->closing().end(locked);
  }
};

// Keeps a connection while an endpoint of it is flushed.
struct UcxConnection::Flushing {
  std::shared_ptr<UcxConnection> connection;
  ucp_ep_h endpoint;

  ControlWorker& worker() const {
    return connection->worker();
  }
  void flushed(Locked& locked, ucs_status_t /*status*/) {
    locked.postAfter([self = connection, flushed = endpoint](Locked& after) {
      if (self->context_->closing().flushEnded(after, flushed)) {
        self->closeByForce(after, flushed);
      }
    });
  }
};

void UcxConnection::close() {
  worker().post(
      [self = shared_from_this()](Locked& locked) { self->closeNow(locked); });
}

void UcxConnection::closeNow(Locked& locked) {
  // An accepter that still waits for the confirmation also says goodbye,
  // because the opener may already take the connection for open.
  const bool accepted = peer() == PeerState::kConnecting && peerMayThinkItOpen_;
  if (isOpen() || accepted) {
    sendActive(
        locked, {.kind = FrameKind::kClose, .token = agreed_.peer.token}, {});
  }
  flushes_ = true;
  hear(
      locked,
      PeerWord::kClosedHere,
      {base::ErrorKind::kShutDown, "this worker closed the connection"});
}

void UcxConnection::lose(const base::Error& why) {
  worker().post([self = shared_from_this(), why](Locked& locked) {
    self->fail(locked, why);
  });
}

void UcxConnection::whenJudged(base::Error error, Callback callback) {
  if (error.kind != base::ErrorKind::kPeerLost) {
    callback(error);
    return;
  }
  worker().post([self = shared_from_this(),
                 error = std::move(error),
                 callback = std::move(callback)](Locked& locked) mutable {
    if (self->closed()) {
      deferCallback(locked, std::move(callback), self->ending());
    } else if (self->watch_->watched(locked)) {
      self->unjudged_.emplace_back(std::move(error), std::move(callback));
      self->context_->doubt(locked, self);
    } else {
      deferCallback(locked, std::move(callback), std::move(error));
    }
  });
}

void UcxConnection::fail(Locked& locked, base::Error error, bool flush) {
  flushes_ = flush;
  hear(locked, PeerWord::kGivenUp, std::move(error));
}

void UcxConnection::onPathLost(
    Locked& locked,
    ucp_ep_h /*endpoint*/,
    ucs_status_t status) {
  endpointFailed_ = true;
  if (closed()) {
    context_->ended().unpark(locked, *this);
    return;
  }
  hear(
      locked,
      PeerWord::kPathLost,
      toError(
          status,
          peer() == PeerState::kConnecting ? "cannot connect"
                                           : "the connection broke"));
}

void UcxConnection::onHandshakeLate(Locked& locked) {
  if (peer() == PeerState::kConnecting) {
    hear(
        locked,
        PeerWord::kPathLost,
        {base::ErrorKind::kPeerLost,
         "no answer to the introduction within " +
             std::to_string(kHandshakeTime.count()) +
             " s (a worker that hangs, or knows another secret)"});
  }
}

void UcxConnection::onDoubtOver(Locked& locked) {
  hear(locked, PeerWord::kDoubtOver);
  // If the connection is still open here, only a part of it has failed, and
  // each callback gets the error of its own part.
  for (auto& [error, callback] : std::exchange(unjudged_, {})) {
    deferCallback(locked, std::move(callback), std::move(error));
  }
}

void UcxConnection::onPeerChanged(Locked& locked, PeerState before) {
  // The first change of the state is the end of the handshake.
  if (std::exchange(isAccepting_, false)) {
    context_->acceptEnds(locked);
  }
  if (peer() == PeerState::kDoubted) {
    closeEndpoint(locked, /*flush=*/false);
    context_->doubt(locked, shared_from_this());
  } else if (closed() && !isOver(before)) {
    end(locked);
  } else if (peer() == PeerState::kDead) {
    context_->ended().unpark(locked, *this);
  }
}

void UcxConnection::end(Locked& locked) {
  const auto self = shared_from_this(); // forget() may drop the last reference
  const base::Error& error = ending();
  if (error.kind == base::ErrorKind::kPeerLost) {
    context_->peerLost();
  }
  for (auto& frame : std::exchange(unsent_, {})) {
    deferUnsent(locked, std::move(frame), error);
  }
  for (auto& [_, callback] : std::exchange(unjudged_, {})) {
    deferCallback(locked, std::move(callback), error);
  }
  const bool broke = peer() == PeerState::kBroken;
  if (bulk_ != nullptr) {
    const bool mayRead =
        bulk_->peer().mayReadHere && (broke || peer() == PeerState::kClosed);
    std::function<void(Callback)> hold;
    if (mayRead) {
      hold = [&](Callback callback) {
        watch_->hold(locked, std::move(callback));
      };
    }
    bulk_->end(locked, error, hold);
  }
  locked.defer([self] { self->deliveryEnds(); });
  const bool parked = broke && !flushes_ && !endpointFailed_ &&
      endpoint_ != nullptr && context_->ended().park(locked, self);
  if (!parked) {
    closeEndpoint(locked, flushes_);
  }
  if (agreed_.nearness.samePids) {
    context_->bulk().maps().forget(agreed_.peer.process.pid);
  }
  const bool isToHear = broke && peerMayThinkItOpen_;
  const bool lives = watch_->watched(locked) && !watch_->processEnded(locked);
  context_->forget(locked, localToken_);
  if (isToHear) {
    context_->ended().broke(locked, localToken_, self);
  }
  if (isToHear && (lives || parked)) {
    // The peer is told, because its calls wait for answers that may have been
    // lost. A peer on another host that was not parked learns from TCP that the
    // endpoint is closed.
    locked.postAfter([self](Locked& after) {
      self->context_->ended().tell(after, self->localToken_);
    });
  }
  if (watch_->holds(locked)) {
    context_->ended().keep(locked, watch_);
  } else if (!parked) {
    watch_->unwatch(locked);
  }
}

void UcxConnection::tellThatItBroke(Locked& locked) {
  if (endpointCloses_ || toldOfEnd_) {
    tellsAgain_ = true; // see closeEndpoint()
    return;
  }
  if (endpoint_ == nullptr) {
    endpointFailed_ = false;
    if (openEndpoint(locked, agreed_.peer.address, agreed_.nearness)) {
      return; // there is no way to the peer now
    }
    if (!context_->ended().park(locked, shared_from_this())) {
      closeEndpoint(
          locked, /*flush=*/false); // UCX would call an object that is gone
      return;
    }
  }
  toldOfEnd_ = true;
  sendActive(
      locked,
      {.kind = FrameKind::kClose, .count = 1, .token = agreed_.peer.token},
      {});
}

bool UcxConnection::saysClosed(Locked& /*locked*/, const Message& message) {
  SecureChannel* const channel = agreed_.channel.get();
  if (channel == nullptr) {
    return message.header.kind == FrameKind::kClose;
  }
  if (message.header.kind != FrameKind::kSealed) {
    return false;
  }
  auto opened = channel->open(message.header, message.data);
  return opened.ok() && opened.value().header.kind == FrameKind::kClose;
}

void UcxConnection::leavePark(Locked& locked) {
  closeEndpoint(locked, /*flush=*/false);
  if (!watch_->holds(locked)) {
    watch_->unwatch(locked);
  }
}

void UcxConnection::closeEndpoint(Locked& locked, bool flush) {
  if (endpoint_ == nullptr || std::exchange(endpointCloses_, true)) {
    return;
  }
  // UCX does not allow an endpoint to be closed inside of a callback of the
  // same endpoint, so this is done after the callback.
  context_->closing().begin(locked);
  locked.postAfter([self = shared_from_this(), flush](Locked& after) {
    const ucp_ep_h endpoint = std::exchange(self->endpoint_, nullptr);
    self->endpointCloses_ = false;
    self->toldOfEnd_ = false;
    if (!flush || !self->beginFlush(after, endpoint)) {
      self->closeByForce(after, endpoint);
    }
    if (std::exchange(self->tellsAgain_, false) &&
        self->peer() != PeerState::kDead) {
      // What the peer was told may be lost with the endpoint.
      self->context_->ended().tell(after, self->localToken_);
    }
  });
}

// Not by ucp_ep_close_nbx() without force, which flushes too: while a peer is
// stopped, that close never ends, and cannot be forced any more.
bool UcxConnection::beginFlush(Locked& locked, ucp_ep_h endpoint) {
  auto flushing =
      std::make_unique<Flushing>(Flushing{shared_from_this(), endpoint});
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.cb.send =
      FromUcx<base::Boundary::kClosed, &Flushing::flushed>::sentLast;
  params.user_data = flushing.get();
  context_->closing().flushBegins(locked, endpoint, shared_from_this());
  void* request = ucp_ep_flush_nbx(endpoint, &params);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    context_->closing().flushEnded(locked, endpoint);
    return false;
  }
  (void)flushing.release(); // sentLast() deletes this object
  locked.needProgress();
  return true;
}

void UcxConnection::closeByForce(Locked& locked, ucp_ep_h endpoint) {
  auto closing = std::make_unique<Closing>(Closing{shared_from_this()});
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
      UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  params.cb.send = FromUcx<base::Boundary::kClosed, &Closing::closed>::sentLast;
  params.user_data = closing.get();
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = ucp_ep_close_nbx(endpoint, &params);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    context_->closing().end(locked);
  } else {
    (void)closing.release(); // sentLast() deletes this object
    locked.needProgress();
  }
}

} // namespace torch_rpc_ext::transport::ucx
