#include "transport/ucx/bulk/carried.h"

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

// With more bytes, the further copies cost as much as asking for the bulk does.
constexpr uint64_t kMaxBytes = 256u << 10;
// The most that the peer may have been sent in this way without having taken
// it: the peer has not asked for these bytes, and small calls wait behind them.
constexpr uint64_t kMaxUntaken = 512u << 10;
// The kernel of a peer that is stopped takes what fits into the receive buffer
// of the socket, 64 KiB of data at first, and then closes the window. If the
// window stays closed, our kernel gives the connection up as if the host were
// gone (TCP_USER_TIMEOUT). So a peer that has said nothing for a moment gets no
// more than what fits for sure; it has to ask for the rest.
constexpr uint64_t kFitsForSure = 48u << 10;
constexpr std::chrono::milliseconds kMoment{50};

} // namespace

bool Carried::take(
    Locked&,
    uint64_t transfer,
    const Spans& spans,
    std::chrono::steady_clock::duration silence) {
  if (!isApart_) {
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
  const uint64_t limit = silence > kMoment ? kFitsForSure : kMaxUntaken;
  if (bytes > kMaxBytes || untaken_ + bytes > limit) {
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

bool Carried::arrive(Locked&, uint64_t bytes) {
  // No peer that keeps to the protocol gets beyond the limit: its own count is
  // at least as high as this one, because this process subtracts bytes before
  // it acknowledges them.
  return arrived_.fetch_add(bytes) + bytes <= kMaxUntaken;
}

} // namespace torch_rpc_ext::transport::ucx::bulk
