// Measures what both ends compute to open a connection. Prints us of CPU time
// per connection, without and with encryption.

#include "transport/ucx/handshake_session.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <utility>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;

namespace {

constexpr size_t kAddressBytes = 800; // a UCX address on two interfaces
constexpr int kConnections = 5000;
constexpr uint64_t kDoor = 42;

template <typename T>
T need(base::Result<T> result) {
  if (!result.ok()) {
    std::abort();
  }
  return std::move(result.value());
}

base::ConstSpan spanOf(const base::Buffer& buffer) {
  return {buffer.data(), buffer.size()};
}

void handshake(const HandshakeSession::Self& self) {
  HandshakeSession opener(self, {kDoor, {}, self.address}, {});
  const base::Buffer opening = need(opener.open("hello"));
  HandshakeSession accepter(
      self,
      need(HandshakeSession::check(self.groupKey, kDoor, spanOf(opening))),
      {});
  const base::Buffer answer = need(accepter.answer("hello"));
  const base::Buffer confirmation = need(opener.confirm(spanOf(answer)));
  if (accepter.finish(spanOf(confirmation))) {
    std::abort();
  }
}

} // namespace

int main() {
  HandshakeSession::Self self{
      .groupKey = groupKey("a secret of some length"),
      .token = 1,
      .process = {},
      .address = {std::string(kAddressBytes, 'a'), ""}};
  for (const auto encryption : {Encryption::kOff, Encryption::kOn}) {
    self.encryption = encryption;
    const std::clock_t start = std::clock(); // CPU time
    for (int i = 0; i < kConnections; ++i) {
      handshake(self);
    }
    const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;
    std::printf("%.1f\n", seconds * 1e6 / kConnections);
  }
}
