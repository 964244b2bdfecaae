// Measures what both ends compute to open a connection, with the steps of
// transport/ucx/connection_handshake.cpp. Prints us of CPU time per connection,
// without and with encryption.

#include "transport/ucx/handshake.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;

namespace {

constexpr size_t kPreambleBytes = 1000; // a UCX address on two interfaces
constexpr int kConnections = 5000;

void require(bool good) {
  if (!good) {
    std::abort();
  }
}

std::string preamble() {
  std::string bytes(kPreambleBytes, 'p');
  bytes.replace(0, 16, crypto::randomBytes(16)); // the challenge
  return bytes;
}

// One end makes the proof; the other end makes it again and compares.
void prove(const std::string& key, int number, const Transcript& transcript) {
  require(
      crypto::equal(
          proof(key, number, transcript), proof(key, number, transcript)));
}

void handshake(const std::string& key, bool encrypted) {
  std::unique_ptr<crypto::KeyExchange> ends[2];
  if (encrypted) {
    for (auto& end : ends) {
      auto made = crypto::KeyExchange::create();
      require(made.ok());
      end = std::move(made.value());
    }
  }
  Transcript transcript{42, preamble(), {}};
  prove(key, 1, transcript);
  transcript.accepter = preamble();
  prove(key, 2, transcript);
  prove(key, 3, transcript);
  if (encrypted) {
    for (int end = 0; end < 2; ++end) {
      auto shared = ends[end]->agree(ends[1 - end]->publicKey());
      require(shared.ok());
      require(
          deriveKeys(key, transcript, shared.value()).fromOpener.size() == 32);
    }
  }
}

} // namespace

int main() {
  const std::string key = groupKey("a secret of some length");
  for (const bool encrypted : {false, true}) {
    const std::clock_t start = std::clock(); // CPU time
    for (int i = 0; i < kConnections; ++i) {
      handshake(key, encrypted);
    }
    const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;
    std::printf("%.1f\n", seconds * 1e6 / kConnections);
  }
}
