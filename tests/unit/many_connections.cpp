// A limit holds for the handshakes that are under way. Connections that have
// opened do not count, however many there are within the time of a handshake.

#include "side.h"

#include <chrono>
#include <thread>

using namespace torch_rpc_ext;
using stress::require;
using transport::PeerState;
using transport::Side;

namespace {

constexpr int kMoreThanTheLimit = 4200;

} // namespace

int main() {
  const Side opener;
  const Side accepter;
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
