// The request of a receiver for bulk.

#include "fuzz/targets/target.h"
#include "transport/ucx/protocol.h"

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto request = parsePullRequest({data, size});
  if (request.ok()) {
    fuzz::requireSame(
        fuzz::spanOf(encode(request.value())), data, size, "same request");
  }
  return 0;
}
