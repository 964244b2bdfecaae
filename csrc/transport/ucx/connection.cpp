#include "transport/ucx/connection.h"

#include "base/log.h"
#include "transport/ucx/context.h"
#include "transport/ucx/status.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

const char* toString(ConnectionState state) {
  switch (state) {
    case ConnectionState::kOpening:
      return "opening";
    case ConnectionState::kOpen:
      return "open";
    case ConnectionState::kClosed:
      return "closed";
  }
  return "unknown";
}

namespace {

// What an active message needs until UCX has let go of it.
struct ActiveSend {
  std::shared_ptr<UcxConnection> connection;
  base::Buffer data;
};

void onActiveSent(void* request, ucs_status_t status, void* argument) {
  std::unique_ptr<ActiveSend> send(static_cast<ActiveSend*>(argument));
  ucp_request_free(request);
  send->connection->onSent(status);
}

void onEndpointClosed(void* request, ucs_status_t, void* argument) {
  std::unique_ptr<std::shared_ptr<UcxConnection>> connection(
      static_cast<std::shared_ptr<UcxConnection>*>(argument));
  ucp_request_free(request);
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
        switch (self->state()) {
          case ConnectionState::kOpening:
            self->unsent_.push_back(std::move(frame));
            break;
          case ConnectionState::kOpen:
            self->sendNow(std::move(frame));
            break;
          case ConnectionState::kClosed:
            self->deferCallback(std::move(frame.callback), self->ending_);
            break;
        }
      }));
}

void UcxConnection::close() {
  context_->worker().post(base::makeTask([self = shared_from_this()] {
    if (self->state_ == ConnectionState::kOpen) {
      self->sendActive(
          {.kind = FrameKind::kClose, .token = self->peer_.token}, {});
    }
    self->fail(
        {base::ErrorKind::kShutDown, "this worker closed the connection"},
        PeerMemory::kMayRead,
        /*flush=*/true);
  }));
}

void UcxConnection::lose(const base::Error& why) {
  context_->worker().post(base::makeTask([self = shared_from_this(), why] {
    self->fail(why, PeerMemory::kFree);
  }));
}

bool UcxConnection::sharesMemory() const {
  // Who can read the peer's memory can be read by it, too: the same user, the
  // same namespaces. Both are written before the state.
  return state_.load() == ConnectionState::kOpen && exposesMemory_ &&
      cmaUsable_;
}

bool UcxConnection::sendsPieces() const {
  return state_.load() == ConnectionState::kOpen && !sharesMemory();
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
    context_->handler().onClosed(shared_from_this(), ending_);
  }
}

// ---- under the lock --------------------------------------------------------

void UcxConnection::setState(ConnectionState state) {
  base::log(
      base::LogLevel::kDebug,
      "connection " + std::to_string(localToken_ & 0xffff) + ": " +
          toString(state_.load()) + " -> " + toString(state));
  state_ = state;
}

void UcxConnection::deferCallback(Callback callback, base::Error error) {
  if (callback) {
    context_->worker().defer(
        base::makeTask([callback = std::move(callback),
                        error = std::move(error)] { callback(error); }));
  }
}

// Of this host; a zombie does not.
bool UcxConnection::peerLives() const {
  pollfd state{pidFd_, POLLIN, 0};
  return pidFd_ >= 0 && ::poll(&state, 1, 0) == 0;
}

// UCX does not notice the death of a peer whose parent has not reaped it.
void UcxConnection::watchProcess() {
  pidFd_ = static_cast<int>(syscall(SYS_pidfd_open, peer_.process.pid, 0));
  if (pidFd_ < 0) {
    return; // an old kernel: UCX's keepalive has to do
  }
  context_->poller().add(
      pidFd_, [weak = weak_from_this(), pid = peer_.process.pid] {
        auto self = weak.lock();
        if (!self) {
          return;
        }
        self->context_->worker().post(base::makeTask([self, pid] {
          self->peerDied_ = true;
          self->fail(
              {base::ErrorKind::kPeerLost,
               "process " + std::to_string(pid) + " died"},
              PeerMemory::kFree);
        }));
      });
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
    fail(toError(UCS_PTR_STATUS(request), "sending"));
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
  while (!acknowledgements_.empty() && state_ == ConnectionState::kOpen) {
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
    fail(toError(
        status,
        state_ == ConnectionState::kOpening ? "cannot connect" : "sending"));
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

void UcxConnection::fail(base::Error error, PeerMemory memory, bool flush) {
  if (state_ == ConnectionState::kClosed) {
    return;
  }
  const ConnectionState before = state_.load();
  setState(ConnectionState::kClosed);
  ending_ = error;
  auto self = shared_from_this(); // forget() may drop the last reference
  if (error.kind == base::ErrorKind::kPeerLost) {
    context_->peerLost();
  }
  const bool lives = peerLives();
  if (pidFd_ >= 0) {
    context_->poller().remove(pidFd_);
    ::close(pidFd_);
    pidFd_ = -1;
  }
  for (auto& frame : unsent_) {
    deferCallback(std::move(frame.callback), error);
  }
  unsent_.clear();
  const bool readable = exposesMemory_ && memory == PeerMemory::kMayRead;
  std::function<void(Callback)> park;
  if (readable) {
    park = [this](Callback callback) { context_->park(std::move(callback)); };
  }
  transfers_.fail(error, park);
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
  closeEndpoint(flush);
  context_->maps().forget(peer_.process.pid);
  const bool peerMayThinkItOpen = before == ConnectionState::kOpen &&
      ending_.kind != base::ErrorKind::kShutDown && !peerDied_.load();
  context_->forget(localToken_, peerMayThinkItOpen ? self : nullptr);
  if (peerMayThinkItOpen && lives) {
    // Its calls wait for answers that may have been lost. One of another host
    // hears of it from TCP.
    context_->worker().postAfter(base::makeTask([self] {
      self->context_->tellThatItBroke(self->localToken_);
    }));
  }
}

bool UcxConnection::tellThatItBroke() {
  if (endpoint_ != nullptr || openEndpoint(peer_.address)) {
    return false; // it is still being closed; there is no way to the peer
  }
  sendActive({.kind = FrameKind::kClose, .count = 1, .token = peer_.token}, {});
  closeEndpoint(/*flush=*/true);
  return true;
}

void UcxConnection::closeEndpoint(bool flush) {
  if (endpoint_ == nullptr) {
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
        params.cb.send = [](void* request, ucs_status_t status, void* data) {
          auto* connection = static_cast<std::shared_ptr<UcxConnection>*>(data);
          (*connection)->context_->endpointClosed();
          onEndpointClosed(request, status, data);
        };
        params.user_data = held.get();
        params.flags = flush ? 0 : UCP_EP_CLOSE_FLAG_FORCE;
        void* request = ucp_ep_close_nbx(self->endpoint_, &params);
        self->endpoint_ = nullptr;
        if (request == nullptr || UCS_PTR_IS_ERR(request)) {
          self->context_->endpointClosed();
          return;
        }
        (void)held.release();
        self->context_->worker().needProgress();
      }));
}

} // namespace torch_rpc_ext::transport::ucx
