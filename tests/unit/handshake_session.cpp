// HandshakeSession alone: two ends, and what somebody between them could do.

#include "transport/ucx/handshake_session.h"
#include "sanitize/stress.h"

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;
using stress::require;

namespace {

constexpr uint64_t kDoor = 42;
const ProcessIdentity kOpenersProcess{1, 2, 100, 0x1000, 7};
const ProcessIdentity kAcceptersProcess{1, 2, 200, 0x2000, 8};
const Nearness kNear{
    .sameHost = true,
    .samePids = true,
    .sameRights = true,
    .whyNoCma = ""};

base::ConstSpan spanOf(const base::Buffer& buffer) {
  return {buffer.data(), buffer.size()};
}

base::Buffer cut(const base::Buffer& buffer, size_t size) {
  base::Buffer part(size);
  std::memcpy(part.data(), buffer.data(), size);
  return part;
}

base::Buffer changed(const base::Buffer& buffer, size_t at) {
  base::Buffer copy = cut(buffer, buffer.size());
  copy.data()[at] ^= std::byte{1};
  return copy;
}

HandshakeSession::Self self(
    const std::string& secret,
    Encryption encryption,
    uint64_t token,
    const ProcessIdentity& process) {
  return {groupKey(secret), encryption, token, process, {"address", "network"}};
}

// Two ends. Each step gives its message to the other end, unless a test does
// something else with the message.
struct Ends {
  std::string openersSecret = "secret";
  std::string acceptersSecret = "secret";
  Encryption openerWants = Encryption::kOff;
  Encryption accepterWants = Encryption::kOff;
  Nearness openerFinds = kNear;
  Nearness accepterFinds = kNear;
  ProcessIdentity met = kAcceptersProcess; // named by the address

  std::optional<HandshakeSession> opener = {};
  std::optional<HandshakeSession> accepter = {};
  base::Buffer opening = {};
  base::Buffer answer = {};
  base::Buffer confirmation = {};
  base::Error error = {}; // of the last step

  void open() {
    opener.emplace(
        self(openersSecret, openerWants, 1, kOpenersProcess),
        ContextAddress{kDoor, met, {"address", "network"}},
        openerFinds);
    take(opener->open("I open"), opening);
  }
  void accept() {
    auto checked = HandshakeSession::check(
        groupKey(acceptersSecret), kDoor, spanOf(opening));
    if (!checked.ok()) {
      error = checked.error();
      return;
    }
    accepter.emplace(
        self(acceptersSecret, accepterWants, 2, kAcceptersProcess),
        std::move(checked.value()),
        accepterFinds);
    take(accepter->answer("I accept"), answer);
  }
  void confirm() {
    take(opener->confirm(spanOf(answer)), confirmation);
  }
  void finish() {
    error = accepter->finish(spanOf(confirmation));
  }
  // All steps, until one fails.
  Ends& run() {
    open();
    for (auto step : {&Ends::accept, &Ends::confirm, &Ends::finish}) {
      if (!error) {
        (this->*step)();
      }
    }
    return *this;
  }

 private:
  void take(base::Result<base::Buffer> result, base::Buffer& into) {
    if (result.ok()) {
      into = std::move(result.value());
    } else {
      error = result.error();
    }
  }
};

bool saysStranger(const base::Error& error) {
  return error.kind == base::ErrorKind::kRefused &&
      error.message.find("does not know this group's secret") !=
      std::string::npos;
}

void testBothEndsAgree() {
  Ends ends;
  ends.run();
  require(!ends.error, "the handshake succeeds");
  const Agreement opener = ends.opener->takeAgreement();
  const Agreement accepter = ends.accepter->takeAgreement();
  require(
      opener.peer.hello == "I accept" && accepter.peer.hello == "I open",
      "each hears what the other says");
  require(
      opener.peer.token == 2 && accepter.peer.token == 1,
      "each has the other's token");
  require(
      opener.nearness.samePids && accepter.nearness.samePids &&
          opener.nearness.whyNoCma.empty(),
      "both are of one host");
  require(
      opener.channel == nullptr && accepter.channel == nullptr &&
          opener.bulkSendKey.empty(),
      "nobody wants encryption");
}

void testKeysFitEachOther() {
  Ends ends;
  ends.accepterWants = Encryption::kOn;
  ends.openerWants = Encryption::kBetweenHosts; // able to, but sees no need
  ends.run();
  require(!ends.error, "the handshake succeeds");
  const Agreement opener = ends.opener->takeAgreement();
  const Agreement accepter = ends.accepter->takeAgreement();
  require(
      opener.bulkSendKey == accepter.bulkReceiveKey &&
          opener.bulkReceiveKey == accepter.bulkSendKey &&
          opener.bulkSendKey != opener.bulkReceiveKey &&
          opener.bulkSendKey.size() == 32,
      "keys for bulk");
  for (const auto& [from, to] :
       {std::pair(&opener, &accepter), std::pair(&accepter, &opener)}) {
    auto sealed = from->channel->seal(1, {}, {"text", 4});
    require(sealed.ok(), "seals");
    const auto& [header, data] = sealed.value();
    auto opened = to->channel->open(header, spanOf(data));
    require(
        opened.ok() && std::memcmp(opened.value().data().data, "text", 4) == 0,
        "the other end opens it");
  }
}

void testWhoDoesNotKnowTheSecret() {
  Ends stranger;
  stranger.openersSecret = "another";
  stranger.run();
  require(
      saysStranger(stranger.error) && !stranger.accepter,
      "the accepter makes no session for a stranger");

  // Who answers in place of the accepter can read the opener's message.
  Ends ends;
  ends.open();
  const std::string preamble =
      parseSigned(spanOf(ends.opening)).value().preamble;
  HandshakeSession impostor(
      self("another", Encryption::kOff, 2, kAcceptersProcess),
      HandshakeSession::Opening{
          kDoor,
          preamble,
          parsePreamble({preamble.data(), preamble.size()}).value()},
      kNear);
  ends.answer = std::move(impostor.answer("I accept").value());
  ends.confirm();
  require(saysStranger(ends.error), "the opener notices an impostor");
}

void testReplays() {
  Ends first;
  first.run();
  require(!first.error, "the handshake succeeds");
  // Somebody repeats all that the opener has said.
  Ends again;
  again.opening = cut(first.opening, first.opening.size());
  again.accept();
  require(!again.error, "a repeated first message is answered ...");
  again.confirmation = cut(first.confirmation, first.confirmation.size());
  again.finish();
  require(saysStranger(again.error), "... and never confirmed");
  // And what the accepter has said.
  Ends other;
  other.open();
  other.answer = cut(first.answer, first.answer.size());
  other.confirm();
  require(saysStranger(other.error), "an answer is good for one opener");
  require(
      !HandshakeSession::check(
           groupKey("secret"), kDoor + 1, spanOf(first.opening))
           .ok(),
      "a first message is good for one door");
}

void testOrder() {
  const auto invalid = [](const base::Error& error) {
    return error.kind == base::ErrorKind::kInvalid;
  };
  Ends ends;
  ends.open();
  require(
      ends.opener->awaits(FrameKind::kOpened) &&
          !ends.opener->awaits(FrameKind::kConfirm),
      "the opener waits for an answer");
  require(invalid(ends.opener->open("").error()), "opens once");
  require(
      invalid(ends.opener->answer("").error()), "the opener does not answer");
  require(
      invalid(ends.opener->finish(spanOf(ends.opening))),
      "nobody confirms to the opener");
  ends.accept();
  require(
      ends.accepter->awaits(FrameKind::kConfirm) &&
          !ends.accepter->awaits(FrameKind::kOpened),
      "the accepter waits for a confirmation");
  require(
      invalid(ends.accepter->open("").error()), "the accepter does not open");
  require(invalid(ends.accepter->answer("").error()), "answers once");
  require(
      invalid(ends.accepter->confirm(spanOf(ends.answer)).error()),
      "the accepter does not confirm");
  ends.confirm();
  require(
      ends.opener->awaits(FrameKind::kOpened),
      "the same answer may be looked at again ...");
  (void)ends.opener->takeAgreement();
  require(
      !ends.opener->awaits(FrameKind::kOpened) &&
          invalid(ends.opener->confirm(spanOf(ends.answer)).error()),
      "... until the keys are in use");
  ends.finish();
  require(!ends.error, "none of this has changed anything");
}

void testEncryptionWantedByOne() {
  for (const bool byOpener : {true, false}) {
    Ends ends;
    (byOpener ? ends.openerWants : ends.accepterWants) = Encryption::kOn;
    ends.run();
    require(
        ends.error.kind == base::ErrorKind::kRefused &&
            ends.error.message.find("switched off") != std::string::npos,
        "nobody goes on without the encryption that one wants");
  }
  Ends within;
  within.openerWants = Encryption::kBetweenHosts;
  within.run();
  require(!within.error, "within a host");
  Ends between;
  between.openerWants = Encryption::kBetweenHosts;
  between.openerFinds = between.accepterFinds = {};
  between.run();
  require(
      between.error.kind == base::ErrorKind::kRefused, "but not between hosts");
}

// Whoever cannot prove that the other end is of its host takes the other end
// for one of another host, and so does the other end.
void testNearnessIsProvedByBoth() {
  const auto require3 = [](Ends& ends, const char* what) {
    ends.run();
    require(!ends.error, "the handshake succeeds");
    require(
        !ends.opener->nearness().sameHost &&
            !ends.opener->nearness().samePids &&
            !ends.accepter->nearness().sameHost &&
            !ends.accepter->nearness().whyNoCma.empty(),
        what);
  };
  Ends openerAlone;
  openerAlone.accepterFinds = {};
  require3(openerAlone, "only the opener has a proof");
  Ends accepterAlone;
  accepterAlone.openerFinds = {};
  require3(accepterAlone, "only the accepter has a proof");
  Ends somebodyElse; // the proof was about another process
  somebodyElse.met = {1, 2, 201, 0x2000, 9};
  somebodyElse.run();
  require(
      !somebodyElse.error && !somebodyElse.opener->nearness().sameHost,
      "the process that answers is not the one that was met");
}

void testBytes() {
  Ends whole;
  whole.openerWants = whole.accepterWants = Encryption::kOn;
  whole.open();
  const base::Buffer opening = std::move(whole.opening);
  for (size_t size = 0; size < opening.size(); ++size) {
    for (const bool truncates : {true, false}) {
      whole.opening = truncates ? cut(opening, size) : changed(opening, size);
      whole.error = {};
      whole.accept();
      require(saysStranger(whole.error), "a first message that was changed");
    }
  }
  whole.opening = cut(opening, opening.size());
  whole.accept();
  const base::Buffer answer = std::move(whole.answer);
  for (size_t size = 0; size < answer.size(); ++size) {
    for (const bool truncates : {true, false}) {
      whole.answer = truncates ? cut(answer, size) : changed(answer, size);
      whole.error = {};
      whole.confirm();
      require(static_cast<bool>(whole.error), "an answer that was changed");
    }
  }
  whole.answer = cut(answer, answer.size());
  whole.error = {};
  whole.confirm();
  require(!whole.error, "the answer as it was sent");
  const base::Buffer confirmation = std::move(whole.confirmation);
  for (size_t size = 0; size < confirmation.size(); ++size) {
    for (const bool truncates : {true, false}) {
      whole.confirmation =
          truncates ? cut(confirmation, size) : changed(confirmation, size);
      whole.finish();
      require(saysStranger(whole.error), "a confirmation that was changed");
    }
  }
  whole.confirmation = cut(confirmation, confirmation.size());
  whole.finish();
  require(!whole.error, "the confirmation as it was sent");
}

} // namespace

int main() {
  testBothEndsAgree();
  testKeysFitEachOther();
  testWhoDoesNotKnowTheSecret();
  testReplays();
  testOrder();
  testEncryptionWantedByOne();
  testNearnessIsProvedByBoth();
  testBytes();
  return 0;
}
