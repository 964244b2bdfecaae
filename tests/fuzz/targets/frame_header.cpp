// The header of every active message.

#include "fuzz/targets/target.h"
#include "transport/ucx/protocol.h"

using namespace torch_rpc_ext;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto header = transport::ucx::parseHeader({data, size});
  if (header.ok()) {
    const auto kind = header.value().kind;
    fuzz::require(
        kind >= transport::ucx::FrameKind::kOpen &&
            kind <= transport::ucx::FrameKind::kAbort,
        "a kind that there is");
    fuzz::require(
        kind != transport::ucx::FrameKind::kFrame ||
            (header.value().count == 0) == (header.value().transfer == 0),
        "bulk has a number, by which its sender hears what becomes of it");
    // Senders send the struct itself, so its bytes must be those that were
    // read.
    fuzz::requireSame(
        {&header.value(), sizeof(header.value())}, data, size, "same header");
  }
  return 0;
}
