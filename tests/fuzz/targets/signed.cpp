// A preamble with its proof: the first bytes of a connection.

#include "fuzz/targets/target.h"
#include "transport/ucx/handshake.h"
#include "transport/ucx/protocol.h"

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto parsed = parseSigned({data, size});
  if (!parsed.ok()) {
    return 0;
  }
  const Signed& s = parsed.value();
  fuzz::requireSame(
      fuzz::spanOf(withProof(s.preamble, s.proof)), data, size, "same bytes");
  static const std::string key = groupKey("what this process has just drawn");
  fuzz::require(
      !crypto::equal(s.proof, proof(key, 1, {1, s.preamble, {}})),
      "who does not know the secret has no proof");
  return 0;
}
