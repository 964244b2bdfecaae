#pragma once

#include "agent/device/launcher.h"
#include "agent/device/region.h"

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>

namespace torch_rpc_ext::agent::device {

// Lets devices compute checksums of regions, and write them to pinned memory.
// Owns: that memory, together with the holders of memory().
// Thread: one.
class Sums {
 public:
  // `most`: at most this many regions will be added. Without a launcher no
  // checksum is computed.
  Sums(Launcher* launcher, size_t most) : launcher_(launcher), most_(most) {}

  // Queues the computation on the current stream of the region's device.
  // Returns where the checksum will be when this work is over; null if no
  // kernel can be launched. May throw c10::Error.
  const uint64_t* add(const Region& region);

  // To be held until the checksums are read; empty if there are none.
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
