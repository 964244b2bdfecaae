#pragma once

#include "agent/device/region.h"
#include "agent/device/streams.h"
#include "cuda/kernels.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

namespace torch_rpc_ext::agent::device {

// The kernels of torch_rpc_ext/kernels on the current streams, where they can
// be launched: a real device, its driver, numba-cuda. Whether they can is found
// out at the first use of a device and kernel, and logged then. Nothing waits
// for a device; that first use takes the GIL, and may take seconds to compile.
//
// Owns: the driver and what it has loaded.
// Thread: any, without locks held.
class Launcher {
 public:
  // Before the first use; without it torch has to do all.
  void setSource(cuda::PtxSource source) {
    source_ = std::move(source);
  }

  // Copies or casts all runs, which are on `device`, by one launch. False where
  // torch has to.
  bool segments(
      c10::Device device,
      std::span<const cuda::Segment> runs,
      cuda::Cast cast);

  // Copies or casts between two layouts on `device` by one launch. False where
  // torch has to.
  bool strided(
      c10::Device device,
      const cuda::Layout& source,
      const cuda::Layout& destination,
      cuda::Cast cast);

  // Writes the checksum of bytes of a device to the eight bytes at `sum`, there
  // or in pinned memory. False where somebody else has to.
  bool checksum(const Region& region, cuda::Address sum);
  // Whether that kernel can be launched there.
  bool hasChecksum(c10::Device device);

 private:
  // Null where it cannot be launched.
  cuda::Kernels* kernelsFor(c10::Device device, const std::string& kernel);
  cuda::Kernels* loaded();
  bool find(c10::Device device, const std::string& kernel);

  cuda::PtxSource source_;
  std::mutex mutex_;
  bool tried_ = false; // to load the driver
  std::unique_ptr<cuda::Kernels> kernels_;
  std::map<std::pair<c10::DeviceIndex, std::string>, bool> usable_;
};

} // namespace torch_rpc_ext::agent::device
