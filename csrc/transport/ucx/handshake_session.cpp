#include "transport/ucx/handshake_session.h"

#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

base::Error stranger() {
  return {
      base::ErrorKind::kRefused,
      "the other end does not know this group's secret"};
}

bool wants(Encryption policy, bool sameHost) {
  return policy == Encryption::kOn ||
      (policy == Encryption::kBetweenHosts && !sameHost);
}

} // namespace

base::Result<HandshakeSession::Opening> HandshakeSession::check(
    const std::string& groupKey,
    uint64_t door,
    base::ConstSpan data) {
  auto given = parseSigned(data);
  if (!given.ok() ||
      !crypto::equal(
          given.value().proof,
          proof(groupKey, 1, {door, given.value().preamble, {}}))) {
    return base::Error{
        base::ErrorKind::kRefused, "does not know this group's secret"};
  }
  std::string& bytes = given.value().preamble;
  auto preamble = parsePreamble({bytes.data(), bytes.size()});
  if (!preamble.ok()) {
    return base::Error{
        preamble.error().kind, "sent a " + preamble.error().message};
  }
  return Opening{door, std::move(bytes), std::move(preamble.value())};
}

HandshakeSession::HandshakeSession(
    Self self,
    const ContextAddress& accepter,
    Nearness found)
    : self_(std::move(self)),
      isOpener_(true),
      found_(accepter.process),
      step_(Step::kOpens) {
  transcript_.door = accepter.door;
  agreement_.nearness = std::move(found);
}

HandshakeSession::HandshakeSession(Self self, Opening opening, Nearness found)
    : self_(std::move(self)),
      isOpener_(false),
      found_(opening.preamble.process),
      step_(Step::kAnswers) {
  transcript_.door = opening.door;
  transcript_.opener = std::move(opening.bytes);
  agreement_.peer = std::move(opening.preamble);
  agreement_.nearness = std::move(found);
  if (!agreement_.peer.sameHost) {
    partWays();
  }
}

base::Result<base::Buffer> HandshakeSession::open(const std::string& hello) {
  if (base::Error error = require(Step::kOpens)) {
    return error;
  }
  auto preamble = introduce(hello);
  if (!preamble.ok()) {
    return preamble.error();
  }
  transcript_.opener = std::move(preamble.value());
  step_ = Step::kAwaitsAnswer;
  return withProof(transcript_.opener, proof(self_.groupKey, 1, transcript_));
}

base::Result<base::Buffer> HandshakeSession::answer(const std::string& hello) {
  if (base::Error error = require(Step::kAnswers)) {
    return error;
  }
  auto preamble = introduce(hello);
  if (!preamble.ok()) {
    return preamble.error();
  }
  transcript_.accepter = std::move(preamble.value());
  if (base::Error error = agreeOnEncryption()) {
    return error;
  }
  step_ = Step::kAwaitsConfirmation;
  return withProof(transcript_.accepter, proof(self_.groupKey, 2, transcript_));
}

base::Result<base::Buffer> HandshakeSession::confirm(base::ConstSpan answer) {
  if (base::Error error = require(Step::kAwaitsAnswer)) {
    return error;
  }
  auto given = parseSigned(answer);
  if (!given.ok()) {
    return given.error();
  }
  transcript_.accepter = std::move(given.value().preamble);
  if (!proves(2, given.value().proof)) {
    return stranger();
  }
  auto preamble =
      parsePreamble({transcript_.accepter.data(), transcript_.accepter.size()});
  if (!preamble.ok()) {
    return preamble.error();
  }
  agreement_.peer = std::move(preamble.value());
  if (!agreement_.peer.sameHost || agreement_.peer.process != found_) {
    partWays();
  }
  if (base::Error error = agreeOnEncryption()) {
    return error;
  }
  return withProof({}, proof(self_.groupKey, 3, transcript_));
}

base::Error HandshakeSession::finish(base::ConstSpan confirmation) {
  if (base::Error error = require(Step::kAwaitsConfirmation)) {
    return error;
  }
  const std::string given(
      static_cast<const char*>(confirmation.data), confirmation.size);
  return proves(3, given) ? base::Error{} : stranger();
}

Agreement HandshakeSession::takeAgreement() {
  if (isOpener_) {
    step_ = Step::kOver;
  }
  return std::move(agreement_);
}

base::Error HandshakeSession::require(Step step) const {
  return step_ == step ? base::Error{}
                       : base::Error{
                             base::ErrorKind::kInvalid,
                             "a message of the handshake out of order"};
}

bool HandshakeSession::proves(int number, const std::string& given) const {
  return crypto::equal(given, proof(self_.groupKey, number, transcript_));
}

// This end's preamble, encoded.
base::Result<std::string> HandshakeSession::introduce(
    const std::string& hello) {
  Preamble preamble;
  if (self_.encryption != Encryption::kOff) {
    auto exchange = crypto::KeyExchange::create();
    if (!exchange.ok()) {
      return exchange.error();
    }
    keyExchange_ = std::move(exchange.value());
    preamble.keyShare = keyExchange_->publicKey();
  }
  preamble.token = self_.token;
  preamble.process = self_.process;
  preamble.sameHost = agreement_.nearness.sameHost;
  preamble.address = self_.address;
  preamble.hello = hello;
  preamble.challenge = crypto::randomBytes(kChallengeBytes);
  preamble.encryption = self_.encryption;
  const base::Buffer bytes = encode(preamble);
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// The other end has no proof that it is on the host of this end. Both ends must
// take the same way, so this end, too, treats the peer as one of another host.
void HandshakeSession::partWays() {
  agreement_.nearness = {};
  agreement_.nearness.whyNoCma =
      "the other end has no proof that it is of this host";
}

base::Error HandshakeSession::agreeOnEncryption() {
  const bool sameHost = agreement_.nearness.sameHost;
  const bool mine = wants(self_.encryption, sameHost);
  const bool theirs = wants(agreement_.peer.encryption, sameHost);
  if (!mine && !theirs) {
    return {};
  }
  if (keyExchange_ == nullptr || agreement_.peer.keyShare.empty()) {
    return {
        base::ErrorKind::kRefused,
        mine ? "this worker wants encryption, and the other one has it "
               "switched off (option encryption)"
             : "the other worker wants encryption, and this one has it "
               "switched off (option encryption)"};
  }
  auto shared = keyExchange_->agree(agreement_.peer.keyShare);
  if (!shared.ok()) {
    return shared.error();
  }
  const SessionKeys keys =
      deriveKeys(self_.groupKey, transcript_, shared.value());
  agreement_.channel = std::make_unique<SecureChannel>(keys, isOpener_);
  agreement_.bulkSendKey =
      isOpener_ ? keys.bulkFromOpener : keys.bulkFromAccepter;
  agreement_.bulkReceiveKey =
      isOpener_ ? keys.bulkFromAccepter : keys.bulkFromOpener;
  return {};
}

} // namespace torch_rpc_ext::transport::ucx
