#pragma once

#include "agent/device/launcher.h"
#include "agent/device/region.h"
#include "wire/call_frame.h"

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <vector>

namespace torch_rpc_ext::agent::device {

// gather() copies many regions of one device into one block of bytes on that
// device; scatter() copies them back. Either takes one kernel launch for each
// dtype, or a few launches of torch's own kernels; gather() takes one more for
// each region with scattered elements. Both queue their work on the current
// stream, and may throw c10::Error.

// Fewer regions than this are copied one by one.
inline constexpr size_t kMinGathered = 4;

// A region and its place in the block.
struct Slice : Region {
  size_t offset = 0; // in the block; from cuda::aligned()
  wire::WireDtype dtype = wire::WireDtype::kFloat32; // in the block

  bool narrowed() const {
    return dtype != wire::WireDtype::kFloat32;
  }
  size_t size() const { // bytes in the block
    return bytes / wire::widening(dtype);
  }
};

// Copies all regions to their places in `block`. Without a launcher torch
// copies, and then the block may be on another device than the regions.
void gather(
    const std::vector<Slice>& slices,
    const c10::Storage& block,
    Launcher* launcher);
// Copies from `block` to the slices' storages. Each slice must be a whole
// storage.
void scatter(
    const c10::Storage& block,
    const std::vector<Slice>& slices,
    Launcher* launcher);

} // namespace torch_rpc_ext::agent::device
