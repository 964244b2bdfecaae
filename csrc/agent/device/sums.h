#pragma once

#include "agent/device/launcher.h"
#include "agent/device/region.h"

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>

namespace torch_rpc_ext::agent::device {

// Checksums that devices compute of bytes that they have, into pinned memory.
// Owns: that memory, until its last sum is read.
// Thread: one.
class Sums {
 public:
  // `most`: regions that will be added. Without a launcher nothing is computed.
  Sums(Launcher* launcher, size_t most) : launcher_(launcher), most_(most) {}

  // Queues it on the current stream of the region's device. Returns where the
  // sum will be once what is queued is over; null where no kernel can be
  // launched. May throw c10::Error.
  const uint64_t* add(const Region& region);

  // To be held until they are read; empty if there are none.
  const c10::Storage& memory() const {
    return memory_;
  }

 private:
  Launcher* const launcher_;
  const size_t most_;
  size_t count_ = 0;
  c10::Storage memory_;
};

} // namespace torch_rpc_ext::agent::device
