// UcxConnection, its beginning: the endpoint and the handshake.

#include "base/log.h"
#include "transport/ucx/connection.h"
#include "transport/ucx/context.h"
#include "transport/ucx/from_ucx.h"
#include "transport/ucx/status.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// How much may arrive before the peer has confirmed who it is. A sender that
// exceeds these limits is no peer of ours.
constexpr size_t kMaxEarlyMessages = 4096;
constexpr size_t kMaxEarlyBytes = 16u << 20;

// The error that the peer gets if the Handler is not called any more, because
// this context stops.
base::Error stopping() {
  return {base::ErrorKind::kShutDown, "the worker shuts down"};
}

bool wants(Encryption policy, bool sameHost) {
  return policy == Encryption::kOn ||
      (policy == Encryption::kBetweenHosts && !sameHost);
}

} // namespace

// Finds out whether the peer is on this host, as far as this end can prove it,
// and if so, begins to watch the peer's process.
void UcxConnection::meet(Locked& locked, const ProcessIdentity& peer) {
  // Opened before the proof, so that the pidfd is of the process that the proof
  // is about. If it were opened afterwards, another process could have the pid
  // by then.
  const int pidFd = PeerWatch::openProcess(peer.pid);
  nearness_ = prove(context_->process(), peer);
  if (nearness_.samePids) {
    // The process is watched because UCX does not notice the death of a peer
    // whose parent has not reaped it.
    watch_->watch(locked, context_->poller(), peer.pid, pidFd);
  } else if (pidFd >= 0) {
    ::close(pidFd);
  }
}

// The other end has no proof that it is on the host of this end. Both ends must
// take the same way, so this end, too, treats the peer as one of another host.
void UcxConnection::partWays(Locked& locked) {
  nearness_ = {};
  nearness_.whyNoCma = "the other end has no proof that it is of this host";
  watch_->unwatch(locked);
}

base::Error UcxConnection::openEndpoint(
    Locked& locked,
    const WorkerAddress& address) {
  const std::string& workerAddress = address.to(nearness_);
  if (workerAddress.empty()) {
    return {
        base::ErrorKind::kPeerLost,
        "cannot connect: no network leads there, and shared memory wants the "
        "same host (" +
            nearness_.whyNoCma + ")"};
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
               ? " (shared memory wants the same host and ipc namespace, TCP "
                 "an interface with an IPv4 or a global IPv6 address)"
               : " (has the worker ended?)")};
}

std::string UcxConnection::introduce(Locked&, const std::string& hello) {
  Preamble preamble;
  preamble.token = localToken_;
  preamble.process = context_->process();
  preamble.sameHost = nearness_.sameHost;
  preamble.address = context_->workerAddress();
  preamble.hello = hello;
  preamble.challenge = crypto::randomBytes(kChallengeBytes);
  preamble.encryption = context_->options().encryption;
  if (keyExchange_ != nullptr) {
    preamble.keyShare = keyExchange_->publicKey();
  }
  const base::Buffer bytes = encode(preamble);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

base::Error UcxConnection::prepareKeys(Locked&) {
  if (context_->options().encryption == Encryption::kOff) {
    return {};
  }
  auto exchange = crypto::KeyExchange::create();
  if (!exchange.ok()) {
    return exchange.error();
  }
  keyExchange_ = std::move(exchange.value());
  return {};
}

base::Error UcxConnection::open(
    Locked& locked,
    const ContextAddress& peer,
    const std::string& hello) {
  if (base::Error error = prepareKeys(locked)) {
    return error;
  }
  meet(locked, peer.process);
  peer_.process = peer.process;
  if (base::Error error = openEndpoint(locked, peer.worker)) {
    return error;
  }
  transcript_.door = peer.door;
  transcript_.opener = introduce(locked, hello);
  sendActive(
      locked,
      {.kind = FrameKind::kOpen, .token = peer.door},
      withProof(
          transcript_.opener,
          proof(context_->groupKey(locked), 1, transcript_)));
  return {};
}

base::Error UcxConnection::accept(
    Locked& locked,
    uint64_t door,
    std::string opener,
    Preamble peer,
    const std::string& hello) {
  if (base::Error error = prepareKeys(locked)) {
    return error;
  }
  peer_ = std::move(peer);
  meet(locked, peer_.process);
  if (!peer_.sameHost) {
    partWays(locked);
  }
  if (base::Error error = openEndpoint(locked, peer_.address)) {
    return error;
  }
  transcript_.door = door;
  transcript_.opener = std::move(opener);
  transcript_.accepter = introduce(locked, hello);
  std::unique_ptr<SecureChannel> channel;
  if (base::Error error = agreeOnEncryption(locked, channel)) {
    return error;
  }
  sendActive(
      locked,
      {.kind = FrameKind::kOpened, .token = peer_.token},
      withProof(
          transcript_.accepter,
          proof(context_->groupKey(locked), 2, transcript_)));
  channel_ = std::move(channel);
  peerMayThinkItOpen_ = true;
  return {};
}

base::Error UcxConnection::onAccepted(Locked& locked, const Signed& accepter) {
  transcript_.accepter = accepter.preamble;
  if (!crypto::equal(
          accepter.proof, proof(context_->groupKey(locked), 2, transcript_))) {
    return {
        base::ErrorKind::kRefused,
        "the other end does not know this group's secret"};
  }
  auto preamble =
      parsePreamble({accepter.preamble.data(), accepter.preamble.size()});
  if (!preamble.ok()) {
    return preamble.error();
  }
  const ProcessIdentity met = std::exchange(peer_, preamble.value()).process;
  if (!peer_.sameHost || peer_.process != met) {
    partWays(locked);
  }
  std::unique_ptr<SecureChannel> channel;
  if (base::Error error = agreeOnEncryption(locked, channel)) {
    return error;
  }
  base::Error refusal = stopping();
  context_->withHandler([&](Handler& handler) {
    refusal = handler.onConnected(shared_from_this(), peer_.hello);
  });
  if (refusal) {
    return refusal;
  }
  sendActive(
      locked,
      {.kind = FrameKind::kConfirm, .token = peer_.token},
      withProof({}, proof(context_->groupKey(locked), 3, transcript_)));
  channel_ = std::move(channel);
  establish(locked);
  return {};
}

base::Error UcxConnection::onConfirm(Locked& locked, base::ConstSpan bytes) {
  const std::string given(static_cast<const char*>(bytes.data), bytes.size);
  if (!crypto::equal(
          given, proof(context_->groupKey(locked), 3, transcript_))) {
    return {
        base::ErrorKind::kRefused,
        "the other end does not know this group's secret"};
  }
  base::Error refusal = stopping();
  context_->withHandler([&](Handler& handler) {
    refusal = handler.onAccept(shared_from_this(), peer_.hello);
  });
  if (refusal) {
    sendRefusal(locked, peer_.token, refusal.message);
    return refusal;
  }
  establish(locked);
  return {};
}

base::Error UcxConnection::agreeOnEncryption(
    Locked& locked,
    std::unique_ptr<SecureChannel>& channel) {
  const bool mine = wants(context_->options().encryption, nearness_.sameHost);
  const bool theirs = wants(peer_.encryption, nearness_.sameHost);
  if (!mine && !theirs) {
    keyExchange_.reset();
    return {};
  }
  if (keyExchange_ == nullptr || peer_.keyShare.empty()) {
    return {
        base::ErrorKind::kRefused,
        mine ? "this worker wants encryption, and the other one has it "
               "switched off (option encryption)"
             : "the other worker wants encryption, and this one has it "
               "switched off (option encryption)"};
  }
  auto shared = keyExchange_->agree(peer_.keyShare);
  keyExchange_.reset();
  if (!shared.ok()) {
    return shared.error();
  }
  const SessionKeys keys =
      deriveKeys(context_->groupKey(locked), transcript_, shared.value());
  channel = std::make_unique<SecureChannel>(keys, initiator_);
  bulkSendKey_ = initiator_ ? keys.bulkFromOpener : keys.bulkFromAccepter;
  bulkReceiveKey_ = initiator_ ? keys.bulkFromAccepter : keys.bulkFromOpener;
  return {};
}

void UcxConnection::establish(Locked& locked) {
  if (closed()) {
    return; // the handshake's last message could not be sent
  }
  const bool useCma = context_->options().useCma;
  whyNoCma_ = useCma ? nearness_.whyNoCma : "switched off by option";
  cmaUsable_ = whyNoCma_.empty();
  exposesMemory_ = useCma && nearness_.samePids;
  if (exposesMemory_ && !cmaUsable_) {
    base::log(
        base::LogLevel::kWarning,
        "large tensors from process " + std::to_string(peer_.process.pid) +
            " go through UCX instead of direct copies: " + whyNoCma_);
  }
  transcript_ = {};
  established_ = true;
  peerMayThinkItOpen_ = true;
  hear(locked, PeerWord::kEstablished);
  while (!unsent_.empty() && open()) {
    Unsent frame = std::move(unsent_.front());
    unsent_.pop_front();
    sendNow(locked, std::move(frame));
  }
}

void UcxConnection::sendRefusal(
    Locked& locked,
    uint64_t token,
    const std::string& why) {
  // The refusal says that the connection is not open.
  peerMayThinkItOpen_ = false;
  base::Buffer text(std::min<size_t>(why.size(), 512));
  std::memcpy(text.data(), why.data(), text.size());
  sendActive(
      locked, {.kind = FrameKind::kRefused, .token = token}, std::move(text));
}

void UcxConnection::keepEarly(
    Locked& locked,
    const FrameHeader& header,
    base::ConstSpan data) {
  earlyBytes_ += data.size;
  if (early_.size() >= kMaxEarlyMessages || earlyBytes_ > kMaxEarlyBytes) {
    fail(
        locked,
        {base::ErrorKind::kInvalid, "the peer speaks before it is known"});
    return;
  }
  base::Buffer bytes(data.size);
  if (data.size != 0) {
    std::memcpy(bytes.data(), data.data, data.size);
  }
  early_.emplace_back(header, std::move(bytes));
}

base::Result<SecureChannel::Opened> UcxConnection::unseal(
    Locked&,
    const FrameHeader& header,
    base::ConstSpan data) {
  if (channel_ == nullptr) {
    return base::Error{
        base::ErrorKind::kInvalid,
        "an encrypted message on a plain connection"};
  }
  return channel_->open(header, data);
}

} // namespace torch_rpc_ext::transport::ucx
