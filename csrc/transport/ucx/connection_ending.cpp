// UcxConnection, its end: what is said about the peer, and what follows.

#include "base/boundary.h"
#include "transport/ucx/connection.h"
#include "transport/ucx/context.h"
#include "transport/ucx/status.h"

#include <memory>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

// ---- any thread ------------------------------------------------------------

void UcxConnection::close() {
  context_->worker().post(base::makeTask([self = shared_from_this()] {
    if (self->open()) {
      self->sendActive(
          {.kind = FrameKind::kClose, .token = self->peer_.token}, {});
    }
    self->flushes_ = true;
    self->hear(
        PeerWord::kClosedHere,
        {base::ErrorKind::kShutDown, "this worker closed the connection"});
  }));
}

void UcxConnection::lose(const base::Error& why) {
  context_->worker().post(
      base::makeTask([self = shared_from_this(), why] { self->fail(why); }));
}

void UcxConnection::whenJudged(base::Error error, Callback callback) {
  if (error.kind != base::ErrorKind::kPeerLost) {
    callback(error);
    return;
  }
  context_->worker().post(
      base::makeTask([self = shared_from_this(),
                      error = std::move(error),
                      callback = std::move(callback)]() mutable {
        if (self->closed()) {
          self->deferCallback(std::move(callback), self->ending());
        } else if (self->watch_->watched()) {
          self->unjudged_.emplace_back(std::move(error), std::move(callback));
          self->context_->doubt(self);
        } else {
          self->deferCallback(std::move(callback), std::move(error));
        }
      }));
}

// ---- under the lock --------------------------------------------------------

void UcxConnection::fail(base::Error error, bool flush) {
  flushes_ = flush;
  hear(PeerWord::kGivenUp, std::move(error));
}

void UcxConnection::onPathLost(ucs_status_t status) {
  endpointFailed_ = true;
  if (closed()) {
    context_->unpark(*this);
    return;
  }
  hear(
      PeerWord::kPathLost,
      toError(
          status,
          peer() == PeerState::kConnecting ? "cannot connect"
                                           : "the connection broke"));
}

void UcxConnection::onDoubtOver() {
  hear(PeerWord::kDoubtOver);
  // Of one that is open still, what failed was a part.
  for (auto& [error, callback] : std::exchange(unjudged_, {})) {
    deferCallback(std::move(callback), std::move(error));
  }
}

void UcxConnection::onPeerChanged(PeerState before) {
  if (peer() == PeerState::kDoubted) {
    closeEndpoint(/*flush=*/false);
    context_->doubt(shared_from_this());
  } else if (closed() && !isOver(before)) {
    end();
  } else if (peer() == PeerState::kDead) {
    context_->unpark(*this);
  }
}

void UcxConnection::end() {
  const auto self = shared_from_this(); // forget() may drop the last reference
  const base::Error& error = ending();
  if (error.kind == base::ErrorKind::kPeerLost) {
    context_->peerLost();
  }
  for (auto& frame : std::exchange(unsent_, {})) {
    deferCallback(std::move(frame.callback), error);
  }
  for (auto& [_, callback] : std::exchange(unjudged_, {})) {
    deferCallback(std::move(callback), error);
  }
  const bool broke = peer() == PeerState::kBroken;
  const bool mayRead =
      exposesMemory_ && (broke || peer() == PeerState::kClosed);
  std::function<void(Callback)> hold;
  if (mayRead) {
    hold = [this](Callback callback) { watch_->hold(std::move(callback)); };
  }
  transfers_.fail(error, hold);
  if (!pulls_.empty()) {
    context_->worker().defer(
        base::makeTask([self, pulls = std::move(pulls_), error] {
          auto bulk = self->context_->bulk();
          for (const auto& [id, transfer] : pulls) {
            bulk.value()->cancel(id, error);
          }
        }));
  }
  context_->worker().defer(base::makeTask([self] { self->deliveryEnds(); }));
  const bool parked = broke && !flushes_ && !endpointFailed_ &&
      endpoint_ != nullptr && context_->park(self);
  if (!parked) {
    closeEndpoint(flushes_);
  }
  if (nearness_.samePids) {
    context_->maps().forget(peer_.process.pid);
  }
  const bool isToHear = broke && peerMayThinkItOpen_;
  const bool lives = watch_->watched() && !watch_->processEnded();
  context_->forget(localToken_, isToHear ? self : nullptr);
  if (isToHear && (lives || parked)) {
    // Its calls wait for answers that may have been lost. One of another host
    // hears of a closed endpoint from TCP.
    context_->worker().postAfter(base::makeTask([self] {
      self->context_->tellThatItBroke(self->localToken_);
    }));
  }
  if (watch_->holds()) {
    context_->keep(watch_);
  } else if (!parked) {
    watch_->unwatch();
  }
}

bool UcxConnection::tellThatItBroke() {
  if (endpointCloses_) {
    return false;
  }
  if (endpoint_ == nullptr) {
    endpointFailed_ = false;
    if (openEndpoint(peer_.address)) {
      return false; // there is no way to the peer
    }
    if (!context_->park(shared_from_this())) {
      closeEndpoint(/*flush=*/false); // UCX would call an object that is gone
      return false;
    }
  }
  sendActive({.kind = FrameKind::kClose, .count = 1, .token = peer_.token}, {});
  return true;
}

void UcxConnection::leavePark() {
  closeEndpoint(/*flush=*/false);
  if (!watch_->holds()) {
    watch_->unwatch();
  }
}

void UcxConnection::onEndpointClosed(
    void* request,
    ucs_status_t,
    void* argument) noexcept {
  const std::unique_ptr<std::shared_ptr<UcxConnection>> connection(
      static_cast<std::shared_ptr<UcxConnection>*>(argument));
  ucp_request_free(request);
  UcxContext& context = *(*connection)->context_;
  const auto count = [&] { context.endpointClosed(); };
  base::guarded(
      base::Boundary::kClosed, count, [&](const base::Error&) { count(); });
}

void UcxConnection::closeEndpoint(bool flush) {
  if (endpoint_ == nullptr || std::exchange(endpointCloses_, true)) {
    return;
  }
  // Not from inside a UCX callback of the same endpoint: after them.
  context_->endpointClosing();
  context_->worker().postAfter(
      base::makeTask([self = shared_from_this(), flush] {
        auto held = std::make_unique<std::shared_ptr<UcxConnection>>(self);
        ucp_request_param_t params{};
        params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
            UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
        params.cb.send = &UcxConnection::onEndpointClosed;
        params.user_data = held.get();
        params.flags = flush ? 0 : UCP_EP_CLOSE_FLAG_FORCE;
        void* request = ucp_ep_close_nbx(self->endpoint_, &params);
        self->endpoint_ = nullptr;
        self->endpointCloses_ = false;
        if (request == nullptr || UCS_PTR_IS_ERR(request)) {
          self->context_->endpointClosed();
          return;
        }
        (void)held.release();
        self->context_->worker().needProgress();
      }));
}

} // namespace torch_rpc_ext::transport::ucx
