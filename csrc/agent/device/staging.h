#pragma once

#include "agent/device/launcher.h"
#include "agent/device/pinned_filling.h"
#include "agent/device/sums.h"
#include "agent/device/way.h"

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <optional>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Pinned host memory, and copies between it and devices. Everything is queued
// on the current streams; all may throw c10::Error.

// Pinned memory of torch's allocator, which keeps it from its next use until
// the copies queued with it are over.
c10::Storage pinned(size_t size);

// Has torch's allocator keep it until what is queued on the current stream of a
// device is over: torch does not know what others than it copy.
void keepFor(const c10::Storage& pinned, c10::Device device);

// Memory of a device, for its current stream.
c10::Storage allocate(c10::Device device, size_t size);

void copyBytes(
    const c10::Storage& to,
    size_t toOffset,
    const c10::Storage& from,
    size_t fromOffset,
    size_t size);

// What brings storages from their devices; `launcher` may be null.
struct StageOptions {
  Launcher* launcher = nullptr;
  bool checked = false; // with checksums
  // Much may leave while the devices still copy the rest. Not with checksums:
  // the frame, which has them, leaves first.
  bool inPieces = false;
};

// A checksum that a device writes to pinned memory.
struct DeviceSum {
  const wire::StorageEntry* entry = nullptr;
  const uint64_t* sum = nullptr;
};

// Where in the filling a storage begins.
struct Filled {
  const wire::StorageEntry* entry = nullptr;
  uint64_t offset = 0;
};

struct Staged {
  std::vector<c10::Storage> held; // pinned
  // Null: all is to be read once what is queued is over. Else: what is small
  // once the filling has reached its first bytes, and these as it says.
  std::shared_ptr<PinnedFilling> filling;
  std::vector<Filled> filled;
  // Of large storages, where devices compute them.
  std::vector<DeviceSum> sums;
};

// Brings storages from their devices to pinned memory, as the dtype that their
// entries have; these then refer to it.
void stage(
    std::vector<Departing>& storages,
    const StageOptions& options,
    Staged& staged);

// A storage that has arrived on the host and goes to `device`.
struct Arriving {
  c10::Device device;
  c10::Storage host;
  bool isPinned = false; // else its bytes are copied first
  c10::Storage landed = {}; // it is on the device already, as it is to be
  wire::WireDtype dtype = wire::WireDtype::kFloat32; // of the host's bytes
};

struct UnstageOptions {
  Launcher* launcher = nullptr; // may be null
  Sums* sums = nullptr; // null for an arrival without checksums
};

struct Unstaged {
  // On their devices, in order.
  std::vector<c10::Storage> storages;
  // Of what was copied from pinned memory, which is a storage or, without an
  // index, the block of all that were not pinned.
  struct Sum {
    std::optional<size_t> index;
    c10::Device device;
    c10::Storage host;
    const uint64_t* sum = nullptr; // null if no kernel could be launched
  };
  std::vector<Sum> sums;
};

// Those that are not pinned are not looked at again.
Unstaged unstage(
    const std::vector<Arriving>& storages,
    const UnstageOptions& options);

} // namespace torch_rpc_ext::agent::device
