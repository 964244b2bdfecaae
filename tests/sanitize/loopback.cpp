// transport::loopback on an executor: sends frames with bulk, closes
// connections, and stops the context amid traffic. Each callback must fire
// exactly once, and no method of the Handler may run after the stop.

#include "transport/loopback/loopback.h"
#include "agent/executor.h"
#include "sanitize/stress.h"

#include <cstring>
#include <memory>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;
using agent::Executor;

namespace {

constexpr size_t kBulkBytes = 1000;

class Echo final : public transport::Handler {
 public:
  std::string introduction() override {
    return "echo";
  }
  base::Error onAccept(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& hello) override {
    return hello == "stranger"
        ? base::Error{base::ErrorKind::kRefused, "not in the group"}
        : base::Error{};
  }
  base::Error onConnected(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    return {};
  }
  void onFrame(
      const transport::ConnectionPtr& /*connection*/,
      std::unique_ptr<transport::Incoming> incoming) override {
    require(!stopped, "no frame after stop()");
    frames.fetch_add(1);
    std::vector<unsigned char> bytes(kBulkBytes);
    if (incoming->head().size % 2 == 0) {
      return; // refuses the bulk
    }
    incoming->receive({{bytes.data(), bytes.size()}}, [](auto&) {}, nullptr);
    require(bytes[0] == 'b' && bytes[kBulkBytes - 1] == 'b', "the bulk");
  }
  void onClosed(
      const transport::ConnectionPtr& /*connection*/,
      const base::Error& error) override {
    require(!stopped, "no end after stop()");
    require(static_cast<bool>(error), "an end has a reason");
  }

  std::atomic<uint64_t> frames{0};
  std::atomic<bool> stopped{false};
};

struct Sent {
  std::atomic<uint64_t> frames{0};
  std::atomic<uint64_t> answered{0};
};

void send(
    const transport::ConnectionPtr& connection,
    const std::string& bulk,
    Sent& sent,
    size_t size) {
  base::Buffer head(1 + size % 8);
  std::memset(head.data(), 'h', head.size());
  transport::BulkSpan span;
  span.data = bulk.data();
  span.size = bulk.size();
  sent.frames.fetch_add(1);
  const auto fired = std::make_shared<std::atomic<bool>>(false);
  connection->send(std::move(head), {span}, [&sent, fired](auto&) {
    require(!fired->exchange(true), "a callback fires once");
    sent.answered.fetch_add(1);
  });
}

// Makes a context, uses it and stops it.
uint64_t live(Executor& executor, Sent& sent) {
  const std::string bulk(kBulkBytes, 'b');
  const auto context = transport::loopback::makeContext();
  const auto handler = std::make_unique<Echo>();
  context->start(executor.poller(), executor, *handler);
  {
    Crowd crowd;
    crowd.add(2, [&](auto& random) {
      const auto connection = context->connect(
          context->address(), random() % 8 == 0 ? "stranger" : "friend");
      for (int i = 0; i < 10; ++i) {
        send(connection, bulk, sent, random());
      }
      connection->close();
      require(connection->closed(), "closed for good");
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    context->stop();
    handler->stopped = true;
    crowd.run(0);
  }
  for (int i = 0; i < 5000 && sent.answered != sent.frames; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  require(sent.answered == sent.frames, "each callback fires");
  return handler->frames.load();
}

} // namespace

int main(int count, char** arguments) {
  Executor executor(2);
  executor.start();
  Sent sent;
  uint64_t frames = 0;
  const auto end = std::chrono::steady_clock::now() +
      std::chrono::duration<double>(seconds(count, arguments));
  do {
    frames += live(executor, sent);
  } while (std::chrono::steady_clock::now() < end);
  require(frames > 0, "frames arrive");
  require(executor.stop(10000), "it ends");
  return 0;
}
