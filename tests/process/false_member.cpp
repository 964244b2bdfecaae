// A member of a group that is no agent, and sends what no agent sends:
//
//   false_member NAME WHAT ADDRESS
//
// ADDRESS, in hex, is that of the other member, a worker. WHAT is
//   "lost report"    a report whose payload is bulk that cannot be fetched
//   "lost offer"     an offer of CUDA IPC with such a payload
//   "short answer"   a lost offer, then such an answer to each report of the
//                    worker at the end of the group
//
// Prints "ready" once its own message has failed; then what else happens. Ends
// when its standard input does.

#include "agent/executor.h"
#include "agent/hello.h"
#include "transport/ucx/context.h"
#include "wire/call_frame.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <utility>

using namespace torch_rpc_ext;
using transport::ucx::UcxContext;

namespace {

// Of agent/message_types.h, which needs torch.
constexpr uint16_t kBarrierRequestType = 0x170;
constexpr uint16_t kBarrierResponseType = 0x270;
constexpr uint16_t kIpcType = 0x171;

void say(const char* what) {
  std::puts(what);
  std::fflush(stdout);
}

void waitFor(std::promise<void>& done, const char* what) {
  if (done.get_future().wait_for(std::chrono::seconds(30)) !=
      std::future_status::ready) {
    std::fprintf(stderr, "does not happen: %s\n", what);
    std::_Exit(1);
  }
}

std::string fromHex(const std::string& hex) {
  std::string bytes;
  for (size_t at = 0; at + 1 < hex.size(); at += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16));
  }
  return bytes;
}

base::Buffer
encode(const wire::CallHeader& header, base::ConstSpan payload, bool isBulk) {
  wire::CallFrame frame;
  frame.header = header;
  frame.payload = payload;
  frame.payloadBulk = isBulk;
  return std::move(wire::encode(frame).value());
}

class Member final : public transport::Handler {
 public:
  Member(const std::string& name, bool answers)
      : hello_(agent::encode(agent::Hello{"the group", 0, name})),
        answers_(answers) {}

  std::string introduction() override {
    return hello_;
  }
  base::Error onAccept(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    return {};
  }
  base::Error onConnected(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    connected.set_value();
    return {};
  }
  void onFrame(
      const transport::ConnectionPtr& connection,
      std::unique_ptr<transport::Incoming> incoming) override {
    auto request = wire::CallFrameView::parse(incoming->head());
    if (!answers_ || !request.ok()) {
      say("a message came");
      return;
    }
    const wire::CallHeader header{
        .kind = wire::CallKind::kResponse,
        .messageType = kBarrierResponseType,
        .callId = request.value().header().callId};
    connection->send(
        encode(header, {"sum", 4}, /*isBulk=*/false),
        {},
        [](const base::Error&) {});
  }
  void onClosed(
      const transport::ConnectionPtr& /*connection*/,
      const base::Error& /*error*/) override {
    say("closed");
  }

  std::promise<void> connected;

 private:
  const std::string hello_;
  const bool answers_;
};

// Sends a request with bulk that cannot be fetched, and waits until the worker
// has given it up.
void sendLost(transport::Connection& connection, uint16_t messageType) {
  static const char kPayload[16] = {};
  transport::BulkSpan bulk{{kPayload, sizeof(kPayload)}};
  bulk.whenFilled = [](uint64_t /*bytes*/, const transport::Callback& then) {
    then({base::ErrorKind::kSystem, "lost"});
  };
  const auto failed = std::make_shared<std::promise<void>>();
  connection.send(
      encode({.messageType = messageType, .callId = 1}, bulk, /*isBulk=*/true),
      {bulk},
      [failed](const base::Error&) { failed->set_value(); });
  waitFor(*failed, "the message fails");
}

} // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    return 2;
  }
  const std::string what = arguments[2];
  Member member(arguments[1], what == "short answer");
  agent::Executor executor(2);
  const auto context = UcxContext::create({}).value();
  context->setSecret("the secret of the group");
  executor.start();
  context->start(executor.poller(), executor, member);
  const auto connection =
      context->connect(fromHex(arguments[3]), member.introduction());
  waitFor(member.connected, "the worker accepts the connection");
  // In every case, because the worker has the connection for sure only once it
  // has received a message.
  sendLost(*connection, what == "lost report" ? kBarrierRequestType : kIpcType);
  say("ready");
  while (std::getchar() != EOF) {
  }
  std::_Exit(0); // without a goodbye
}
