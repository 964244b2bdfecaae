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

// Pinned host memory, and copies between it and devices. All copies are queued
// on the current streams. All functions may throw c10::Error.

// Pinned memory of torch's allocator, which does not give the memory to its
// next user before torch's queued copies with it are over.
c10::Storage pinned(size_t size);

// Makes torch's allocator keep memory, pinned or on a device, until all work
// that is queued now on the current stream of `device` is over. For work that
// torch does not know of, or memory whose storage may die before.
void keepFor(const c10::Storage& memory, c10::Device device);

// Memory on a device, for use on its current stream.
c10::Storage allocate(c10::Device device, size_t size);

void copyBytes(
    const c10::Storage& to,
    size_t toOffset,
    const c10::Storage& from,
    size_t fromOffset,
    size_t size);

struct StageOptions {
  Launcher* launcher = nullptr; // may be null
  bool checked = false; // with checksums
  // Send large storages while devices still copy the rest of them. Not with
  // checksums, because the frame contains them and leaves first.
  bool inPieces = false;
};

// A checksum that a device writes to pinned memory.
struct DeviceSum {
  const wire::StorageEntry* entry = nullptr;
  const uint64_t* sum = nullptr;
};

// Where a storage begins in the PinnedFilling.
struct Filled {
  const wire::StorageEntry* entry = nullptr;
  uint64_t offset = 0;
};

struct Staged {
  std::vector<c10::Storage> held; // pinned memory
  // Null if all bytes can be read only when all queued work is over. Otherwise
  // the storages in `filled` can be read as far as the filling has got, and all
  // others once it has reached firstBytes().
  std::shared_ptr<PinnedFilling> filling;
  std::vector<Filled> filled;
  // Of large storages whose checksums the devices compute.
  std::vector<DeviceSum> sums;
};

// Queues copies of storages from their devices to pinned memory, narrowed to
// the dtype of their entries, and makes the entries refer to the pinned memory.
void stage(
    std::vector<Departing>& storages,
    const StageOptions& options,
    Staged& staged);

// A storage that has arrived on the host and goes to `device`.
struct Arriving {
  c10::Device device;
  c10::Storage host;
  bool isPinned = false; // else the bytes are first copied to pinned memory
  c10::Storage landed = {}; // set if the bytes are on the device already
  wire::WireDtype dtype = wire::WireDtype::kFloat32; // of the host's bytes
};

struct UnstageOptions {
  Launcher* launcher = nullptr; // may be null
  Sums* sums = nullptr; // null for an arrival without checksums
};

struct Unstaged {
  // On their devices, in the order of the arguments.
  std::vector<c10::Storage> storages;
  // The checksum of memory that was copied to a device: of the storage `index`,
  // or, without an index, of the block of all storages for this device that
  // were not pinned.
  struct Sum {
    std::optional<size_t> index;
    c10::Device device;
    c10::Storage host;
    const uint64_t* sum = nullptr; // null if no kernel could be launched
  };
  std::vector<Sum> sums;
};

// Queues the copies of storages to their devices. After this returns, storages
// that are not pinned are not read any more.
Unstaged unstage(
    const std::vector<Arriving>& storages,
    const UnstageOptions& options);

} // namespace torch_rpc_ext::agent::device
