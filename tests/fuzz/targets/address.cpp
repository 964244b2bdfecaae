// A worker's address as it is in the rendezvous store.

#include "fuzz/targets/target.h"
#include "transport/ucx/protocol.h"

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto address = parseAddress(fuzz::toString(data, size));
  if (address.ok()) {
    fuzz::require(!address.value().worker.all.empty(), "an address");
    fuzz::requireSame(
        fuzz::spanOf(encodeAddress(address.value())),
        data,
        size,
        "same address");
  }
  return 0;
}
