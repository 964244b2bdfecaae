// UcxConnection, its beginning: the endpoint and the handshake.

#include "base/descriptor.h"
#include "base/log.h"
#include "transport/ucx/connection.h"
#include "transport/ucx/context.h"
#include "transport/ucx/endpoint_transports.h"
#include "transport/ucx/from_ucx.h"
#include "transport/ucx/status.h"

#include <sys/eventfd.h>

#include <system_error>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// The error that the peer gets if the Handler is not called any more, because
// this context stops.
base::Error stopping() {
  return {base::ErrorKind::kShutDown, "the worker shuts down"};
}

// UCX says "Input/output error" then.
bool noDescriptorLeft() {
  return base::Descriptor(eventfd(0, EFD_CLOEXEC)).fd() < 0;
}

} // namespace

// Finds out whether the peer is on this host, as far as this end can prove it,
// and if so, begins to watch the peer's process.
Nearness UcxConnection::meet(Locked& locked, const ProcessIdentity& peer) {
  // Opened before the proof, so that the pidfd is of the process that the proof
  // is about. If it were opened afterwards, another process could have the pid
  // by then.
  auto process = context_->processWithPid(locked, peer.pid);
  Nearness found = prove(context_->process(), peer);
  if (found.samePids) {
    // The process is watched because UCX does not notice the death of a peer
    // whose parent has not reaped it.
    watch_->watch(locked, peer.pid, std::move(process));
  }
  return found;
}

base::Error UcxConnection::openEndpoint(
    Locked& locked,
    const WorkerAddress& address,
    const Nearness& nearness) {
  const std::string& workerAddress = address.to(nearness);
  if (workerAddress.empty()) {
    return {
        base::ErrorKind::kPeerLost,
        "cannot connect: no network leads to the worker, and shared memory "
        "needs the same host (" +
            nearness.whyNoCma + ")"};
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(workerAddress.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb =
      FromUcx<base::Boundary::kBroken, &UcxConnection::onPathLost>::broken;
  params.err_handler.arg = this;
  const ucs_status_t status = ucp_ep_create(locked.get(), &params, &endpoint_);
  locked.needProgress();
  if (status == UCS_OK) {
    return {};
  }
  // kPeerLost whatever UCX's status is, because there is no way to this peer
  // now.
  return {
      base::ErrorKind::kPeerLost,
      std::string("cannot connect: ") + ucs_status_string(status) +
          (status == UCS_ERR_UNREACHABLE
               ? " (shared memory needs the same host and ipc namespace, TCP "
                 "needs an interface with an IPv4 or a global IPv6 address)"
               : noDescriptorLeft()
               ? " (this process can open no more files: ulimit -n)"
               : " (has the worker ended?)")};
}

void UcxConnection::open(
    Locked& locked,
    const ContextAddress& peer,
    const std::string& hello) {
  const Nearness found = meet(locked, peer.process);
  session_.emplace(context_->self(locked, localToken_), peer, found);
  base::Error error = openEndpoint(locked, peer.worker, found);
  auto message =
      error ? base::Result<base::Buffer>(error) : session_->open(hello);
  if (!message.ok()) {
    fail(locked, message.error());
    return;
  }
  sendActive(
      locked,
      {.kind = FrameKind::kOpen, .token = peer.door},
      std::move(message.value()));
}

void UcxConnection::accept(
    Locked& locked,
    HandshakeSession::Opening opening,
    const std::string& hello) {
  isAccepting_ = true;
  context_->acceptBegins(locked);
  const Nearness found = meet(locked, opening.preamble.process);
  session_.emplace(
      context_->self(locked, localToken_), std::move(opening), found);
  const Preamble& peer = session_->peer();
  base::Error error = openEndpoint(locked, peer.address, session_->nearness());
  auto message =
      error ? base::Result<base::Buffer>(error) : session_->answer(hello);
  if (!message.ok()) {
    sendRefusal(locked, peer.token, message.error());
    fail(locked, message.error(), /*flush=*/true);
    return;
  }
  sendActive(
      locked,
      {.kind = FrameKind::kOpened, .token = peer.token},
      std::move(message.value()));
  agree(locked);
}

void UcxConnection::onHandshake(Locked& locked, const Message& message) {
  if (message.header.kind == FrameKind::kRefused) {
    if (agreed_.channel != nullptr) {
      // A stranger who has listened to the connection knows its token, and
      // must not be able to end the connection.
      context_->refused("dropped: a plain refusal on an encrypted connection");
      return;
    }
    fail(locked, {base::ErrorKind::kRefused, toText(message.data)});
    return;
  }
  if (peer() != PeerState::kConnecting || !session_ ||
      !session_->awaits(message.header.kind)) {
    return;
  }
  const bool answered = message.header.kind == FrameKind::kOpened;
  if (base::Error error = answered ? onAnswer(locked, message.data)
                                   : onConfirmation(locked, message.data)) {
    context_->refused("refused a connection: " + error.message);
    fail(locked, std::move(error), /*flush=*/true);
    return;
  }
  if (closed()) {
    return; // the handshake's last message could not be sent
  }
  for (auto& [early, bytes] : std::exchange(early_, {})) {
    onSealedOrPlain(locked, {early, {bytes.data(), bytes.size()}});
  }
}

base::Error UcxConnection::onAnswer(Locked& locked, base::ConstSpan data) {
  auto confirmation = session_->confirm(data);
  if (!confirmation.ok()) {
    return confirmation.error();
  }
  const Preamble& peer = session_->peer();
  base::Error refusal = stopping();
  context_->withHandler([&](Handler& handler) {
    refusal = handler.onConnected(shared_from_this(), peer.hello);
  });
  if (refusal) {
    return refusal;
  }
  sendActive(
      locked,
      {.kind = FrameKind::kConfirm, .token = peer.token},
      std::move(confirmation.value()));
  agree(locked);
  establish(locked);
  return {};
}

base::Error UcxConnection::onConfirmation(
    Locked& locked,
    base::ConstSpan data) {
  if (base::Error error = session_->finish(data)) {
    return error;
  }
  base::Error refusal = stopping();
  context_->withHandler([&](Handler& handler) {
    refusal = handler.onAccept(shared_from_this(), agreed_.peer.hello);
  });
  if (refusal) {
    sendRefusal(locked, agreed_.peer.token, refusal);
    return refusal;
  }
  establish(locked);
  return {};
}

// This end has sent its last message of the handshake. What it sends from now
// on is encrypted, if the two ends have agreed on that.
void UcxConnection::agree(Locked& locked) {
  agreed_ = session_->takeAgreement();
  peerMayThinkItOpen_ = true;
  if (!agreed_.nearness.samePids) {
    watch_->unwatch(locked); // this end alone took the peer for one of its host
  }
}

std::vector<std::string> UcxConnection::addressesForPeer(Locked&) const {
  try {
    return tcpAddressesOf(
        transportsOf(endpoint_), context_->options().preferIpv6);
  } catch (const std::system_error& error) {
    base::log(
        base::LogLevel::kWarning,
        std::string("large tensors come through UCX, which is slower: ") +
            error.what());
    return {};
  }
}

void UcxConnection::establish(Locked& locked) {
  if (closed()) {
    return;
  }
  const bool useCma = context_->options().useCma;
  bulk::Peer peer{
      .pid = agreed_.peer.process.pid,
      .nearness = agreed_.nearness,
      .mayReadHere = useCma && agreed_.nearness.samePids,
      .whyUnreadable =
          useCma ? agreed_.nearness.whyNoCma : "switched off by option",
      .sendKey = std::move(agreed_.bulkSendKey),
      .receiveKey = std::move(agreed_.bulkReceiveKey),
      .reachesUsAt = addressesForPeer(locked)};
  if (peer.mayReadHere && !peer.readable()) {
    base::log(
        base::LogLevel::kWarning,
        "large tensors from process " + std::to_string(peer.pid) +
            " go through UCX instead of direct copies: " + peer.whyUnreadable);
  }
  bulk::Link& link = *this;
  bulk_ =
      std::make_unique<bulk::Exchange>(link, context_->bulk(), std::move(peer));
  session_.reset();
  hear(locked, PeerWord::kEstablished);
  while (!unsent_.empty() && isOpen()) {
    Unsent frame = std::move(unsent_.front());
    unsent_.pop_front();
    sendNow(locked, std::move(frame));
  }
}

void UcxConnection::sendRefusal(
    Locked& locked,
    uint64_t token,
    const base::Error& why) {
  // The refusal says that the connection is not open.
  peerMayThinkItOpen_ = false;
  sendActive(
      locked, {.kind = FrameKind::kRefused, .token = token}, encodeReason(why));
}

} // namespace torch_rpc_ext::transport::ucx
