#pragma once

#include "transport/ucx/bulk/transfers.h"
#include "transport/ucx/worker.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <unordered_map>

namespace torch_rpc_ext::transport::ucx::bulk {

// Decides which bulk of a connection travels in the frame itself, between the
// table of spans and the head. On a network, asking for bulk takes a round trip
// and wakes each end several times, which costs more than copying does if the
// bulk is small.
//
// Owns: the sizes of what the peer has not acknowledged yet, and how much has
//   come from the peer and is still in frames.
// Thread: any.
// Outlives: nothing; the Exchange owns it.
class Carried {
 public:
  // `isApart`: TCP and nothing else joins the two ends.
  explicit Carried(bool isApart) : isApart_(isApart) {}

  // ---- the sender's end ----

  // Whether the frame of `transfer` is to carry these spans. If so, they count
  // until release(). `silence`: how long ago the peer's last message has come.
  bool take(
      Locked&,
      uint64_t transfer,
      const Spans& spans,
      std::chrono::steady_clock::duration silence);
  // The peer has acknowledged the transfer, or the transfer has failed. Does
  // nothing if the transfer does not count.
  void release(Locked&, uint64_t transfer);

  // ---- the receiver's end ----

  // A frame carries so many bytes, which count until copied(). False if the
  // peer sends more than take() would have let it.
  bool arrive(Locked&, uint64_t bytes);
  // The bytes have left their frame. To be called before the peer hears so.
  void copied(uint64_t bytes) {
    arrived_.fetch_sub(bytes);
  }

 private:
  const bool isApart_;
  std::unordered_map<uint64_t, uint64_t> sizes_; // by transfer
  uint64_t untaken_ = 0; // the sum of sizes_
  std::atomic<uint64_t> arrived_{0};
};

} // namespace torch_rpc_ext::transport::ucx::bulk
