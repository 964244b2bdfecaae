// A context that stops during a handshake says goodbye: the other end may have
// its answer already, and take the connection for open.

#include "agent/executor.h"
#include "transport/ucx/context.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>

using namespace torch_rpc_ext;
using transport::ucx::UcxContext;
using namespace std::chrono_literals;

namespace {

void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::_Exit(1);
  }
}

class Side final : public transport::Handler {
 public:
  Side() {
    auto made = UcxContext::create({});
    require(made.ok(), "a context");
    context = made.value();
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
  // Called when the answer has arrived and the confirmation is not sent yet.
  base::Error onConnected(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    answered.set_value();
    mayConfirm.get_future().wait();
    return {};
  }
  void onFrame(
      const transport::ConnectionPtr& /*connection*/,
      std::unique_ptr<transport::Incoming> /*incoming*/) override {}
  void onClosed(
      const transport::ConnectionPtr& /*connection*/,
      const base::Error& /*error*/) override {
    closed.set_value();
  }

  agent::Executor executor{2};
  std::shared_ptr<UcxContext> context;
  std::promise<void> answered;
  std::promise<void> mayConfirm;
  std::promise<void> closed;
};

} // namespace

int main() {
  Side opener;
  Side accepter;
  const auto connection =
      opener.context->connect(accepter.context->address(), "hello");
  require(
      opener.answered.get_future().wait_for(30s) == std::future_status::ready,
      "the accepter answers");
  accepter.context->stop();
  opener.mayConfirm.set_value();
  require(
      opener.closed.get_future().wait_for(10s) == std::future_status::ready,
      "the opener hears of the end");
  require(
      connection->peer() == transport::PeerState::kLeft,
      "the accepter has left, and was not lost");
  return 0;
}
