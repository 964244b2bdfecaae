// The public key that the peer sends for the key agreement.

#include "crypto/crypto.h"
#include "fuzz/targets/target.h"

using namespace torch_rpc_ext;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto exchange = crypto::KeyExchange::create();
  fuzz::require(exchange.ok(), "X25519 is there");
  auto shared = exchange.value()->agree(fuzz::toString(data, size));
  if (shared.ok()) {
    fuzz::require(size == 32, "only a whole key is one");
    fuzz::require(
        shared.value() != std::string(32, '\0'), "not a secret of zeros");
  }
  return 0;
}
