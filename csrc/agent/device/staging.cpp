#include "agent/device/staging.h"

#include "agent/device/bytes_view.h"
#include "agent/device/gather.h"

// A warning of GCC that is torch's business.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Winterference-size"
#include <ATen/core/CachingHostAllocator.h>
#pragma GCC diagnostic pop
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace torch_rpc_ext::agent::device {

c10::Storage pinned(size_t size) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      size,
      at::getHostAllocator(kType)->allocate(size));
}

c10::Storage allocate(c10::Device device, size_t size) {
  return at::empty(
             {static_cast<int64_t>(size)},
             at::TensorOptions().dtype(at::kByte).device(device))
      .storage();
}

void copyBytes(
    const c10::Storage& to,
    size_t toOffset,
    const c10::Storage& from,
    size_t fromOffset,
    size_t size) {
  if (size == 0) {
    return;
  }
  const c10::NoGradGuard noGrad;
  bytesOf(to, toOffset, size)
      .copy_(bytesOf(from, fromOffset, size), /*non_blocking=*/true);
}

namespace {

// Below this the frame would leave hardly earlier.
constexpr uint64_t kMinBytesInPieces = 2 * kPieceBytes;

// DeviceIndex -> slices of the block of that device.
using Groups = std::map<c10::DeviceIndex, std::vector<Slice>>;

size_t blockSize(const std::vector<Slice>& slices) {
  return slices.back().offset + slices.back().size();
}

void append(
    std::vector<Slice>& slices,
    const c10::Storage& storage,
    wire::WireDtype dtype) {
  const size_t offset = slices.empty() ? 0 : aligned(blockSize(slices));
  slices.push_back({storage, offset, dtype});
}

// Whether each is copied on its own, without a block.
bool copiedSingly(const std::vector<Slice>& slices) {
  return slices.size() < kMinGathered &&
      std::none_of(
             slices.begin(),
             slices.end(),
             [](const Slice& slice) { return slice.narrowed(); });
}

void toHost(
    const std::vector<Slice>& slices,
    const c10::Storage& host,
    Launcher* launcher) {
  if (copiedSingly(slices)) {
    for (const Slice& slice : slices) {
      copyBytes(host, slice.offset, slice.storage, 0, slice.size());
    }
    return;
  }
  const size_t size = blockSize(slices);
  const c10::Storage block = allocate(slices.front().storage.device(), size);
  gather(slices, block, launcher);
  copyBytes(host, 0, block, 0, size);
}

void toDevice(
    const c10::Storage& host,
    const std::vector<Slice>& slices,
    Launcher* launcher) {
  if (copiedSingly(slices)) {
    for (const Slice& slice : slices) {
      copyBytes(slice.storage, 0, host, slice.offset, slice.size());
    }
    return;
  }
  const size_t size = blockSize(slices);
  const c10::Storage block = allocate(slices.front().storage.device(), size);
  copyBytes(block, 0, host, 0, size);
  scatter(block, slices, launcher);
}

char* at(const c10::Storage& host, size_t offset) {
  return static_cast<char*>(host.mutable_data()) + offset;
}

c10::Stream currentStream(const c10::Storage& storage) {
  return c10::impl::VirtualGuardImpl(kType).getStream(storage.device());
}

// Has a device compute checksums, of what it is about to copy to the host.
class Summing {
 public:
  Summing(const StageOptions& options, size_t most, Staged& staged)
      : launcher_(options.checked ? options.launcher : nullptr),
        most_(most),
        staged_(staged) {}

  void add(const wire::StorageEntry& entry, const c10::Storage& storage) {
    if (launcher_ == nullptr) {
      return;
    }
    if (next_ == nullptr) {
      memory_ = pinned(most_ * sizeof(uint64_t));
      next_ = static_cast<uint64_t*>(memory_.mutable_data());
      staged_.held.push_back(memory_);
    }
    if (!launcher_->checksum(storage, next_)) {
      return;
    }
    staged_.sums.push_back({&entry, next_++});
    // Torch does not know that a device writes there.
    const auto& memory = memory_.data_ptr();
    at::getHostAllocator(kType)->record_event(
        memory.get(), memory.get_context(), currentStream(storage));
  }

 private:
  Launcher* const launcher_;
  const size_t most_;
  Staged& staged_;
  c10::Storage memory_;
  uint64_t* next_ = nullptr;
};

// The bytes of a large storage, as they travel: itself unless it is narrowed.
c10::Storage
asSent(const Departing& departing, size_t size, Launcher* launcher) {
  const wire::WireDtype dtype = departing.entry->dtype;
  if (dtype == wire::WireDtype::kFloat32) {
    return departing.storage;
  }
  const c10::Storage block = allocate(departing.storage.device(), size);
  gather({{departing.storage, 0, dtype}}, block, launcher);
  return block;
}

uint64_t sizeOf(const std::vector<Departing*>& large) {
  uint64_t bytes = 0;
  for (const Departing* departing : large) {
    bytes += departing->entry->bytes.size;
  }
  return bytes;
}

// Copies piece by piece. One piece can be several storages, as small ones have
// no need of an event each.
void fill(
    const std::vector<Departing*>& large,
    Launcher* launcher,
    Staged& staged) {
  uint64_t offset = 0;
  uint64_t unmarked = 0;
  std::vector<c10::Storage> held;
  for (size_t i = 0; i < large.size(); ++i) {
    wire::StorageEntry& entry = *large[i]->entry;
    const size_t size = entry.bytes.size;
    const c10::Storage sent = asSent(*large[i], size, launcher);
    const c10::Storage host = pinned(size);
    const bool isLastOfDevice = i + 1 == large.size() ||
        large[i + 1]->storage.device() != sent.device();
    held.insert(held.end(), {large[i]->storage, sent, host});
    for (size_t at = 0; at < size; at += kPieceBytes) {
      const size_t piece = std::min(kPieceBytes, size - at);
      copyBytes(host, at, sent, at, piece);
      unmarked += piece;
      if (unmarked >= kPieceBytes || (isLastOfDevice && at + piece == size)) {
        // The same storages are behind pieces to come.
        staged.filling->add(
            currentStream(sent), std::exchange(unmarked, 0), held);
        if (at + piece == size) {
          held.clear();
        }
      }
    }
    entry.bytes.data = host.data();
    staged.held.push_back(host);
    staged.filled.push_back({&entry, std::exchange(offset, offset + size)});
  }
}

} // namespace

void stage(
    std::vector<Departing>& storages,
    const StageOptions& options,
    Staged& staged) {
  Groups groups;
  std::map<c10::DeviceIndex, std::vector<wire::StorageEntry*>> entries;
  std::vector<Departing*> large;
  for (Departing& departing : storages) {
    wire::StorageEntry& entry = *departing.entry;
    if (entry.beside || entry.bytes.size == 0) {
      continue;
    }
    if (entry.bulk) {
      large.push_back(&departing);
    } else {
      const auto index = departing.storage.device().index();
      append(groups[index], departing.storage, entry.dtype);
      entries[index].push_back(&entry);
    }
  }
  const bool inPieces = options.inPieces && !options.checked &&
      sizeOf(large) >= kMinBytesInPieces;
  if (inPieces) {
    staged.filling = std::make_shared<PinnedFilling>();
  }
  for (const auto& [index, slices] : groups) {
    staged.held.push_back(pinned(blockSize(slices)));
    const c10::Storage& host = staged.held.back();
    toHost(slices, host, options.launcher);
    for (size_t i = 0; i < slices.size(); ++i) {
      entries[index][i]->bytes.data = at(host, slices[i].offset);
    }
    if (inPieces) {
      staged.filling->add(currentStream(slices.front().storage), 0, {host});
    }
  }
  if (inPieces) {
    fill(large, options.launcher, staged);
    return;
  }
  Summing summing(options, large.size(), staged);
  for (const Departing* departing : large) {
    wire::StorageEntry& entry = *departing->entry;
    const size_t size = entry.bytes.size;
    const c10::Storage sent = asSent(*departing, size, options.launcher);
    summing.add(entry, sent);
    staged.held.push_back(pinned(size));
    copyBytes(staged.held.back(), 0, sent, 0, size);
    entry.bytes.data = staged.held.back().data();
  }
}

std::vector<c10::Storage> unstage(
    const std::vector<Arriving>& storages,
    Launcher* launcher) {
  std::vector<c10::Storage> result;
  result.reserve(storages.size());
  Groups groups;
  std::map<c10::DeviceIndex, std::vector<const c10::Storage*>> sources;
  for (const Arriving& arriving : storages) {
    if (arriving.landed) {
      result.push_back(arriving.landed);
      continue;
    }
    const size_t size = arriving.host.nbytes();
    result.push_back(
        allocate(arriving.device, size * wire::widening(arriving.dtype)));
    if (size == 0) {
      continue;
    }
    if (arriving.isPinned) {
      toDevice(arriving.host, {{result.back(), 0, arriving.dtype}}, launcher);
    } else {
      const auto index = arriving.device.index();
      append(groups[index], result.back(), arriving.dtype);
      sources[index].push_back(&arriving.host);
    }
  }
  for (const auto& [index, slices] : groups) {
    const c10::Storage host = pinned(blockSize(slices));
    for (size_t i = 0; i < slices.size(); ++i) {
      const c10::Storage& from = *sources[index][i];
      std::memcpy(at(host, slices[i].offset), from.data(), from.nbytes());
    }
    toDevice(host, slices, launcher);
  }
  return result;
}

} // namespace torch_rpc_ext::agent::device
