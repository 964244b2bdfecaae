#pragma once

#include "agent/device/launcher.h"
#include "agent/device/region.h"
#include "wire/call_frame.h"

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <vector>

namespace torch_rpc_ext::agent::device {

// Many storages of one device and one block of bytes there, back and forth: by
// one launch of a kernel for each dtype, or by torch in a few; elements that
// are scattered take one each. Queued on the current stream; both may throw
// c10::Error.

// Fewer are copied one by one.
inline constexpr size_t kMinGathered = 4;

// A region's begin in the block, where it has this dtype; multiples of 16 so
// that every element is aligned.
struct Slice : Region {
  size_t offset = 0;
  wire::WireDtype dtype = wire::WireDtype::kFloat32;

  bool narrowed() const {
    return dtype != wire::WireDtype::kFloat32;
  }
  size_t size() const { // in the block
    return bytes / wire::widening(dtype);
  }
};

// Where the next slice begins after one that ends at `end`.
constexpr size_t aligned(size_t end) {
  return (end + 15) / 16 * 16;
}

// Copies all regions into their places in `block`. `launcher` may be null, and
// the block is on another device only if torch is to copy.
void gather(
    const std::vector<Slice>& slices,
    const c10::Storage& block,
    Launcher* launcher);
// The other way, to whole storages.
void scatter(
    const c10::Storage& block,
    const std::vector<Slice>& slices,
    Launcher* launcher);

} // namespace torch_rpc_ext::agent::device
