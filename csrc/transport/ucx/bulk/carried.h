#pragma once

#include "transport/ucx/bulk/link.h"
#include "transport/ucx/bulk/transfers.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <unordered_map>

namespace torch_rpc_ext::transport::ucx::bulk {

// Decides which bulk of a connection travels in the frame itself, between the
// table of spans and the head. On a network, asking for bulk takes a round trip
// and wakes each end several times, which costs more than copying does if the
// bulk is small.
//
// Owns: the sizes of what the peer has not taken yet.
// Thread: any.
// Outlives: nothing.
class Carried {
 public:
  explicit Carried(const Peer& peer) : onlyTcp_(!peer.reachesUsAt.empty()) {}

  // Whether the frame of `transfer` is to carry these spans. If so, they count
  // until release().
  bool take(Locked&, uint64_t transfer, const Spans& spans);
  // The transfer is over.
  void release(Locked&, uint64_t transfer);

 private:
  const bool onlyTcp_;
  std::unordered_map<uint64_t, uint64_t> sizes_; // by transfer
  uint64_t untaken_ = 0; // the sum of sizes_
};

} // namespace torch_rpc_ext::transport::ucx::bulk
