// A limit holds for the handshakes that are under way. Connections that have
// opened do not count, however many there are within the time of a handshake.

#include "agent/executor.h"
#include "sanitize/stress.h"
#include "transport/ucx/context.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>

using namespace torch_rpc_ext;
using stress::require;
using transport::PeerState;
using transport::ucx::UcxContext;

namespace {

constexpr int kMoreThanTheLimit = 4200;

class Side final : public transport::Handler {
 public:
  Side() {
    context->setSecret("secret");
    executor.start();
    context->start(executor.poller(), executor, *this);
  }
  ~Side() override {
    context->stop();
    require(executor.stop(10000), "the executor ends");
  }

  std::string introduction() override {
    return "side";
  }
  base::Error onAccept(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    return {};
  }
  base::Error onConnected(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    return {};
  }
  void onFrame(
      const transport::ConnectionPtr& /*connection*/,
      std::unique_ptr<transport::Incoming> /*incoming*/) override {}
  void onClosed(
      const transport::ConnectionPtr& /*connection*/,
      const base::Error& /*error*/) override {}

  agent::Executor executor{1};
  std::shared_ptr<UcxContext> context = UcxContext::create({}).value();
};

} // namespace

int main() {
  Side opener;
  Side accepter;
  for (int i = 0; i < kMoreThanTheLimit; ++i) {
    const auto connection =
        opener.context->connect(accepter.context->address(), "hello");
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (connection->peer() == PeerState::kConnecting &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    require(connection->peer() == PeerState::kOpen, "each connection opens");
    connection->close();
  }
  return 0;
}
