#pragma once

#include "agent/device/region.h"
#include "agent/device/streams.h"
#include "base/error.h"
#include "base/synchronized.h"
#include "cuda/kernels.h"

#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace torch_rpc_ext::agent::device {

// Launches the kernels of torch_rpc_ext/kernels on the current streams. That
// needs a real device, its driver and numba-cuda; whether they are there is
// found out, and logged, at the first use of a kernel on a device. The first
// use takes the GIL, and may take seconds to compile. Nothing waits for a
// device.
//
// Owns: the driver, and the kernels that it has loaded.
// Thread: any that holds no lock.
class Launcher {
 public:
  // To be called before the first use. Without a source no kernel is launched.
  void setSource(cuda::PtxSource source) {
    source_ = std::move(source);
  }

  // Copies or casts all runs, which are on `device`. False if torch has to do
  // it.
  bool segments(
      c10::Device device,
      std::span<const cuda::Segment> runs,
      cuda::Cast cast);

  // Copies or casts between two layouts on `device`, by one launch. False if
  // torch has to do it.
  bool strided(
      c10::Device device,
      const cuda::Layout& source,
      const cuda::Layout& destination,
      cuda::Cast cast);

  // Writes the checksum of a region's bytes to the eight bytes at `sum`, which
  // are on the region's device or in pinned memory. False if no kernel can be
  // launched.
  bool checksum(const Region& region, cuda::Address sum);
  // Whether the kernel for checksums can be launched on `device`.
  bool hasChecksum(c10::Device device);

 private:
  using Key = std::pair<c10::DeviceIndex, std::string>; // device, kernel
  struct State {
    bool tried = false; // whether loading the driver was tried
    std::unique_ptr<cuda::Kernels> kernels;
    // The error of the last attempt to load each kernel; kNone: it is loaded.
    std::map<Key, base::ErrorKind> outcomes;
  };

  // Null if this kernel cannot be launched on this device.
  cuda::Kernels* kernelsFor(c10::Device device, const std::string& kernel);
  cuda::Kernels* loaded();

  cuda::PtxSource source_;
  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::agent::device
