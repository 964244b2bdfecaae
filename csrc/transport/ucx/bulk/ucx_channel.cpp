#include "transport/ucx/bulk/ucx_channel.h"

#include "transport/ucx/from_ucx.h"
#include "transport/ucx/status.h"

#include <chrono>

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

// How long stop() waits for what is under way, and then for UCX to end what is
// still under way when its endpoints are closed.
constexpr std::chrono::milliseconds kDrainTime{200};
constexpr std::chrono::milliseconds kEndTime{50};
// How many chunks are refused that the peer may never send, because it died or
// because it gave up first.
constexpr size_t kMostRefusals = 4096;

void closeNow(BulkLocked&, ucp_ep_h endpoint) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = ucp_ep_close_nbx(endpoint, &params);
  if (UCS_PTR_IS_PTR(request)) {
    ucp_request_free(request);
  }
}

} // namespace

struct UcxChannel::Batch {
  UcxChannel* channel = nullptr;
  uint64_t id = 0;
  Callback callback;
  size_t left = 0; // chunks that have not ended, plus 1 until all are posted
  // Of a receive(), for cancel(): the tag of each.
  std::unordered_map<void*, uint64_t> requests;
  uint64_t firstTag = 0;
  std::vector<base::MutableSpan> chunks; // of a receive(), by tag
  Incoming::Arrived arrived;
  base::Error error;

  BulkWorker& worker() const {
    return channel->worker();
  }
  void sent(BulkLocked& locked, ucs_status_t status) {
    channel->chunkDone(locked, this, status);
  }
  void sendFailed(BulkLocked& locked, const base::Error& why) {
    // An error of this worker. The receiver may have taken the chunk.
    channel->chunkFailed(
        locked, this, {base::ErrorKind::kPeerLost, why.message});
  }
  void received(
      BulkLocked& locked,
      void* request,
      ucs_status_t status,
      const ucp_tag_recv_info_t* info) {
    const auto posted = requests.extract(request);
    if (status == UCS_ERR_CANCELED && posted) {
      locked.postAfter([channel = channel->shared_from_this(),
                        tag = posted.mapped()](BulkLocked& after) {
        channel->refuse(after, tag);
      });
    }
    if (status == UCS_OK && !error) {
      channel->chunkArrived(locked, this, *info);
    }
    channel->chunkDone(locked, this, status);
  }
  void receiveFailed(
      BulkLocked& locked,
      void* request,
      ucs_status_t /*status*/,
      const ucp_tag_recv_info_t* /*info*/,
      const base::Error& why) {
    requests.erase(request);
    channel->chunkFailed(locked, this, why);
  }
};

UcxChannel::UcxChannel(std::shared_ptr<BulkWorker> worker, base::Poller& poller)
    : worker_(std::move(worker)), address_(worker_->address()) {
  worker_->start(poller, /*main=*/false);
}

UcxChannel::~UcxChannel() = default;

uint64_t UcxChannel::receive(
    uint64_t tag,
    std::vector<base::MutableSpan> chunks,
    Callback callback,
    Incoming::Arrived arrived) {
  uint64_t id = 0;
  worker_->runLocked([&](BulkLocked& locked) {
    auto batch = std::make_unique<Batch>();
    id = nextBatch_++;
    batch->channel = this;
    batch->id = id;
    batch->callback = std::move(callback);
    batch->arrived = std::move(arrived);
    batch->firstTag = tag;
    batch->chunks = std::move(chunks);
    if (stopped_) {
      batch->error = transportEnded();
      batch->chunks.clear();
    }
    // All chunks are counted before the first is posted, because one that the
    // peer has already sent ends right there. And one more is counted, so that
    // the batch lives until all are posted.
    batch->left = 1 + batch->chunks.size();
    Batch* raw = batch.get();
    batches_.emplace(id, std::move(batch));
    for (const auto& chunk : raw->chunks) {
      ucp_request_param_t params{};
      // Not complete at once, without the callback that checks the size: a peer
      // may have sent the chunk before it was asked for it.
      params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
          UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
      params.cb.recv = FromUcx<
          base::Boundary::kBulkReceived,
          &Batch::received,
          &Batch::receiveFailed>::received;
      params.user_data = raw;
      const size_t left = raw->left;
      void* request = ucp_tag_recv_nbx(
          locked.get(), chunk.data, chunk.size, tag, ~uint64_t{0}, &params);
      if (!UCS_PTR_IS_PTR(request)) {
        chunkDone(locked, raw, UCS_PTR_STATUS(request));
      } else if (raw->left == left) { // else the request is over already
        raw->requests.emplace(request, tag);
      }
      ++tag;
    }
    chunkDone(locked, raw, UCS_OK);
    locked.needProgress();
  });
  return id;
}

void UcxChannel::cancel(uint64_t id, base::Error why) {
  worker_->post([self = shared_from_this(), id, why](BulkLocked& locked) {
    auto it = self->batches_.find(id);
    if (it == self->batches_.end()) {
      return;
    }
    if (!it->second->error) {
      it->second->error = why;
    }
    // Each cancelled request still completes, see Batch::received(). A
    // completion changes `requests`, so this is a copy.
    const auto requests = it->second->requests;
    for (const auto& [request, tag] : requests) {
      ucp_request_cancel(locked.get(), request);
    }
    locked.needProgress();
  });
}

void UcxChannel::send(
    const std::string& peerAddress,
    uint64_t firstTag,
    std::vector<base::ConstSpan> chunks,
    Callback callback) {
  worker_->post([self = shared_from_this(),
                 peerAddress,
                 firstTag,
                 chunks = std::move(chunks),
                 callback = std::move(callback)](BulkLocked& locked) mutable {
    auto batch = std::make_unique<Batch>();
    Batch* raw = batch.get();
    raw->channel = self.get();
    raw->id = self->nextBatch_++;
    raw->callback = std::move(callback);
    raw->left = 1;
    if (self->stopped_) {
      raw->error = transportEnded();
    }
    self->batches_.emplace(raw->id, std::move(batch));
    ucp_ep_h endpoint =
        raw->error ? nullptr : self->endpoint(locked, peerAddress, raw->error);
    uint64_t tag = firstTag;
    for (const auto& chunk : chunks) {
      if (raw->error) {
        break;
      }
      ucp_request_param_t params{};
      params.op_attr_mask =
          UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
      params.cb.send =
          FromUcx<base::Boundary::kBulkSent, &Batch::sent, &Batch::sendFailed>::
              sent;
      params.user_data = raw;
      void* request =
          ucp_tag_send_nbx(endpoint, chunk.data, chunk.size, tag++, &params);
      if (UCS_PTR_IS_ERR(request)) {
        raw->error = toError(UCS_PTR_STATUS(request), "sending bulk");
      } else if (request != nullptr) {
        ++raw->left;
      }
    }
    self->chunkDone(locked, raw, UCS_OK);
    locked.needProgress();
  });
}

void UcxChannel::stop() {
  const auto isIdle = [this](BulkLocked&) { return batches_.empty(); };
  worker_->progressUntil(isIdle, kDrainTime);
  worker_->runLocked([&](BulkLocked& locked) {
    for (const auto& [address, endpoint] : endpoints_) {
      closeNow(locked, endpoint);
    }
    endpoints_.clear();
    stopped_ = true;
    for (void* request : std::deque(refusals_)) { // each leaves the list
      ucp_request_cancel(locked.get(), request);
    }
  });
  worker_->progressUntil(isIdle, kEndTime);
  // Before the callbacks fire: from then on UCX must not write into the memory
  // of these batches, so no thread may progress the worker.
  worker_->stop();
  worker_->runLocked([&](BulkLocked& locked) {
    // UCX has not ended these batches yet. Their callbacks fire now, because
    // their owners must not wait for UCX.
    for (auto& [id, batch] : batches_) {
      locked.defer([callback = std::exchange(batch->callback, nullptr)] {
        callback(transportEnded());
      });
    }
  });
}

ucp_ep_h UcxChannel::endpoint(
    BulkLocked& locked,
    const std::string& peerAddress,
    base::Error& error) {
  auto it = endpoints_.find(peerAddress);
  if (it != endpoints_.end()) {
    return it->second;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peerAddress.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb =
      FromUcx<base::Boundary::kBulkBroken, &UcxChannel::dropEndpoint>::broken;
  params.err_handler.arg = this;
  ucp_ep_h endpoint = nullptr;
  error = toError(
      ucp_ep_create(locked.get(), &params, &endpoint), "connecting bulk");
  if (!error) {
    endpoints_.emplace(peerAddress, endpoint);
  }
  return endpoint;
}

void UcxChannel::dropEndpoint(
    BulkLocked& locked,
    ucp_ep_h ep,
    ucs_status_t /*status*/) {
  // UCX itself ends the sends of this endpoint with errors. A later send opens
  // a new endpoint.
  std::erase_if(
      endpoints_, [ep](const auto& entry) { return entry.second == ep; });
  locked.postAfter([ep](BulkLocked& after) { closeNow(after, ep); });
}

void UcxChannel::chunkArrived(
    BulkLocked& locked,
    Batch* batch,
    const ucp_tag_recv_info_t& info) {
  const uint64_t index = info.sender_tag - batch->firstTag;
  if (index >= batch->chunks.size() ||
      info.length != batch->chunks[index].size) {
    batch->error = {
        base::ErrorKind::kInvalid, "a chunk of bulk has the wrong size"};
  } else if (batch->arrived) {
    locked.defer([arrived = batch->arrived, chunk = batch->chunks[index]] {
      arrived(chunk);
    });
  }
}

// The peer may have sent the chunk, or may send it until it hears that nobody
// wants it. If no receive were there, UCX would keep the chunk here, or not end
// the peer's send. A receive without room ends both.
void UcxChannel::refuse(BulkLocked& locked, uint64_t tag) {
  if (stopped_) {
    return;
  }
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
      UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  params.cb.recv =
      FromUcx<base::Boundary::kBulkReceived, &UcxChannel::refused>::received;
  params.user_data = this;
  const uint64_t over = refusalsOver_;
  void* request =
      ucp_tag_recv_nbx(locked.get(), nullptr, 0, tag, ~uint64_t{0}, &params);
  if (UCS_PTR_IS_PTR(request) && refusalsOver_ == over) {
    refusals_.push_back(request);
  }
  if (refusals_.size() > kMostRefusals) {
    ucp_request_cancel(locked.get(), refusals_.front());
  }
  locked.needProgress();
}

void UcxChannel::refused(
    BulkLocked&,
    void* request,
    ucs_status_t /*status*/,
    const ucp_tag_recv_info_t* /*info*/) {
  ++refusalsOver_;
  std::erase(refusals_, request);
}

// The exception came before the chunk was counted, see chunkDone(), so the
// chunk is counted here.
void UcxChannel::chunkFailed(
    BulkLocked& locked,
    Batch* batch,
    const base::Error& error) {
  if (!batch->error) {
    batch->error = error;
  }
  chunkDone(locked, batch, UCS_OK);
}

void UcxChannel::chunkDone(
    BulkLocked& locked,
    Batch* batch,
    ucs_status_t status) {
  if (status != UCS_OK && !batch->error) {
    batch->error = toError(status, "moving bulk");
  }
  if (batch->left > 1) {
    --batch->left;
    return;
  }
  if (batch->callback) {
    // Copied, not moved: if defer() throws, chunkFailed() comes here again and
    // needs the callback.
    locked.defer([callback = batch->callback, error = batch->error] {
      callback(error);
    });
  }
  batches_.erase(batch->id);
}

} // namespace torch_rpc_ext::transport::ucx::bulk
