#include "transport/ucx/bulk/carried.h"

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

// With more bytes, the further copies cost as much as asking for the bulk does.
constexpr uint64_t kMaxBytes = 256u << 10;
// The most that the peer may have been sent in this way without having taken
// it: the peer has not asked for these bytes, and small calls wait behind them.
constexpr uint64_t kMaxUntaken = 512u << 10;

} // namespace

bool Carried::take(Locked&, uint64_t transfer, const Spans& spans) {
  if (!onlyTcp_) {
    return false;
  }
  uint64_t bytes = 0;
  for (const BulkSpan& span : spans) {
    // The frame must not wait for a span that is still being filled.
    if (span.size > kMaxBytes || span.whenFilled != nullptr) {
      return false;
    }
    bytes += span.size;
  }
  if (bytes > kMaxBytes || untaken_ + bytes > kMaxUntaken) {
    return false;
  }
  sizes_.emplace(transfer, bytes);
  untaken_ += bytes;
  return true;
}

void Carried::release(Locked&, uint64_t transfer) {
  if (const auto node = sizes_.extract(transfer)) {
    untaken_ -= node.mapped();
  }
}

} // namespace torch_rpc_ext::transport::ucx::bulk
