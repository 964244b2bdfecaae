// The preamble, in which the peer's transport introduces itself.

#include "fuzz/targets/target.h"
#include "transport/ucx/protocol.h"

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto preamble = parsePreamble({data, size});
  if (preamble.ok()) {
    const Preamble& p = preamble.value();
    fuzz::require(p.token != 0, "a token");
    fuzz::require(!p.address.all.empty(), "an address");
    fuzz::require(p.challenge.size() <= kChallengeBytes, "small challenge");
    fuzz::require(p.keyShare.size() <= kKeyShareBytes, "small key share");
    fuzz::requireSame(fuzz::spanOf(encode(p)), data, size, "same preamble");
  }
  return 0;
}
