// A context that stops during a handshake says goodbye: the other end may have
// its answer already, and take the connection for open.

#include "side.h"

#include <chrono>
#include <future>
#include <string>

using namespace torch_rpc_ext;
using stress::require;
using namespace std::chrono_literals;

namespace {

class Slow : public transport::Welcoming {
 public:
  // Called when the answer has arrived and the confirmation is not sent yet.
  base::Error onConnected(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    answered.set_value();
    mayConfirm.get_future().wait();
    return {};
  }
  void onClosed(
      const transport::ConnectionPtr& /*connection*/,
      const base::Error& /*error*/) override {
    closed.set_value();
  }

  std::promise<void> answered;
  std::promise<void> mayConfirm;
  std::promise<void> closed;
};

} // namespace

int main() {
  transport::Side<Slow> opener;
  transport::Side<Slow> accepter;
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
