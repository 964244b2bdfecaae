// UcxContext, how connections begin: the messages of the handshake and their
// checks.

#include "base/log.h"
#include "transport/ucx/context.h"

#include <string>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// How many connections may begin within the time of one handshake, which is
// more than any group needs. A stranger who has recorded what a peer of ours
// said, and repeats it, can begin this many connections and no more.
constexpr size_t kMaxOpening = 4096;

} // namespace

std::shared_ptr<UcxConnection> UcxContext::makeConnection(
    Locked& locked,
    bool initiator) {
  const uint64_t token = randomToken();
  auto connection = UcxConnection::create(shared_from_this(), token, initiator);
  untold_.fetch_add(1);
  connections_.emplace(token, connection);
  openings_->add(locked, connection);
  return connection;
}

void UcxContext::setSecret(const std::string& secret) {
  control_->runLocked([&](Locked&) { groupKey_ = ucx::groupKey(secret); });
}

void UcxContext::onOpen(
    Locked& locked,
    const FrameHeader& header,
    base::ConstSpan data) {
  const auto refuse = [this](const std::string& why) {
    refusals_(
        base::LogLevel::kWarning, "refused a connection: the other end " + why);
  };
  if (header.token != doorToken_ || groupKey_.empty()) {
    refuse("does not know this worker's address token");
    return;
  }
  if (header.version != kProtocolVersion) {
    refuse(
        "speaks version " + std::to_string(header.version) +
        " of the torch_rpc_ext protocol, this worker version " +
        std::to_string(kProtocolVersion) +
        ": install the same torch_rpc_ext everywhere");
    return;
  }
  auto opener = parseSigned(data);
  if (!opener.ok() ||
      !crypto::equal(
          opener.value().proof,
          proof(groupKey_, 1, {header.token, opener.value().preamble, {}}))) {
    refuse("does not know this group's secret");
    return;
  }
  const std::string& bytes = opener.value().preamble;
  auto preamble = parsePreamble({bytes.data(), bytes.size()});
  if (!preamble.ok()) {
    refuse("sent a " + preamble.error().message);
    return;
  }
  if (openings_->size(locked) >= kMaxOpening) {
    refuse("is one of too many at once");
    return;
  }
  auto connection = makeConnection(locked, /*initiator=*/false);
  const uint64_t token = preamble.value().token;
  std::string introduction;
  withHandler([&](Handler& handler) { introduction = handler.introduction(); });
  base::Error error = connection->accept(
      locked, header.token, bytes, std::move(preamble.value()), introduction);
  if (error) {
    connection->sendRefusal(locked, token, error.message);
    connection->fail(locked, std::move(error), /*flush=*/true);
  }
}

void UcxContext::onHandshake(
    Locked& locked,
    const std::shared_ptr<UcxConnection>& connection,
    const FrameHeader& header,
    base::ConstSpan data) {
  if (header.kind == FrameKind::kRefused) {
    if (connection->encrypted(locked)) {
      // A stranger who has listened to the connection knows its token, and
      // must not be able to end the connection.
      refusals_(
          base::LogLevel::kWarning,
          "dropped: a plain refusal on an encrypted connection");
      return;
    }
    connection->fail(locked, {base::ErrorKind::kRefused, toText(data)});
    return;
  }
  const bool accepted = header.kind == FrameKind::kOpened;
  if (connection->initiator() != accepted ||
      connection->peer() != PeerState::kConnecting) {
    return;
  }
  base::Error error;
  if (accepted) {
    auto accepter = parseSigned(data);
    error = accepter.ok() ? connection->onAccepted(locked, accepter.value())
                          : accepter.error();
  } else {
    error = connection->onConfirm(locked, data);
  }
  if (error) {
    refusals_(
        base::LogLevel::kWarning, "refused a connection: " + error.message);
    connection->fail(locked, std::move(error), /*flush=*/true);
    return;
  }
  for (auto& [early, bytes] : connection->takeEarly(locked)) {
    onFrameOf(locked, connection, early, {bytes.data(), bytes.size()});
  }
}

} // namespace torch_rpc_ext::transport::ucx
