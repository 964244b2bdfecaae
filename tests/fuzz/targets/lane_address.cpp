// The address of a worker's lanes, as it is in a request for bulk.

#include "fuzz/targets/target.h"
#include "transport/ucx/lanes/socket.h"

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx::lanes;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto address = parseAddress(fuzz::toString(data, size));
  if (address.ok()) {
    fuzz::require(!address.value().endpoints.empty(), "an endpoint");
    auto again = parseAddress(encode(address.value()));
    fuzz::require(
        again.ok() && again.value() == address.value(), "same address");
  }
  return 0;
}
