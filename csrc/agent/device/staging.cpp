#include "agent/device/staging.h"

#include "agent/device/bytes_view.h"
#include "agent/device/gather.h"

// torch's header causes this warning of GCC.
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

void keepFor(const c10::Storage& memory, c10::Device device) {
  const at::DataPtr& data = memory.data_ptr();
  const c10::Stream stream = currentStream(device);
  if (memory.device().is_cpu()) {
    at::getHostAllocator(kType)->record_event(
        data.get(), data.get_context(), stream);
  } else {
    c10::impl::VirtualGuardImpl(kType).recordDataPtrOnStream(data, stream);
  }
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
  viewOf(to, toOffset, size, c10::kByte)
      .copy_(viewOf(from, fromOffset, size, c10::kByte), /*non_blocking=*/true);
}

namespace {

// With fewer bytes the frame would leave hardly earlier in pieces.
constexpr uint64_t kMinBytesInPieces = 2 * kPieceBytes;

// DeviceIndex -> slices of the block of that device.
using Groups = std::map<c10::DeviceIndex, std::vector<Slice>>;

size_t blockSize(const std::vector<Slice>& slices) {
  return slices.back().offset + slices.back().size();
}

void append(
    std::vector<Slice>& slices,
    const Region& region,
    wire::WireDtype dtype) {
  const size_t offset = slices.empty() ? 0 : cuda::aligned(blockSize(slices));
  slices.push_back({region, offset, dtype});
}

// Whether each slice is copied on its own, and not through a block.
bool copiedSingly(const std::vector<Slice>& slices) {
  return slices.size() < kMinGathered &&
      std::none_of(
             slices.begin(),
             slices.end(),
             [](const Slice& slice) {
               return slice.narrowed() || slice.scattered != nullptr;
             });
}

void toHost(
    const std::vector<Slice>& slices,
    const c10::Storage& host,
    Launcher* launcher) {
  if (copiedSingly(slices)) {
    for (const Slice& slice : slices) {
      copyBytes(host, slice.offset, slice.storage, slice.begin, slice.size());
    }
    return;
  }
  const size_t size = blockSize(slices);
  const c10::Storage block = allocate(slices.front().device(), size);
  gather(slices, block, launcher);
  copyBytes(host, 0, block, 0, size);
}

// Returns where the checksum of the copied bytes will be; null if none is
// computed.
const uint64_t* toDevice(
    const c10::Storage& host,
    const std::vector<Slice>& slices,
    const UnstageOptions& options) {
  if (copiedSingly(slices) && (options.sums == nullptr || slices.size() == 1)) {
    for (const Slice& slice : slices) {
      copyBytes(slice.storage, 0, host, slice.offset, slice.size());
    }
    return options.sums == nullptr ? nullptr : options.sums->add(slices[0]);
  }
  const size_t size = blockSize(slices);
  const c10::Storage block = allocate(slices.front().device(), size);
  copyBytes(block, 0, host, 0, size);
  const uint64_t* const sum =
      options.sums == nullptr ? nullptr : options.sums->add(block);
  scatter(block, slices, options.launcher);
  return sum;
}

char* at(const c10::Storage& host, size_t offset) {
  return static_cast<char*>(host.mutable_data()) + offset;
}

// The bytes of a large storage as they travel: the storage itself, or a packed
// copy if the elements are narrowed or scattered.
Region asSent(const Departing& departing, size_t size, Launcher* launcher) {
  const wire::WireDtype dtype = departing.entry->dtype;
  if (dtype == wire::WireDtype::kFloat32 && departing.scattered == nullptr) {
    return departing;
  }
  const c10::Storage block = allocate(departing.device(), size);
  gather({{departing, 0, dtype}}, block, launcher);
  return block;
}

using Large = std::vector<const Departing*>;

uint64_t sizeOf(const Large& large) {
  uint64_t bytes = 0;
  for (const Departing* departing : large) {
    bytes += departing->entry->bytes.size;
  }
  return bytes;
}

void copyWhole(
    const Large& large,
    const StageOptions& options,
    Staged& staged) {
  Sums sums(options.checked ? options.launcher : nullptr, large.size());
  for (const Departing* departing : large) {
    wire::StorageEntry& entry = *departing->entry;
    const size_t size = entry.bytes.size;
    const Region sent = asSent(*departing, size, options.launcher);
    if (const uint64_t* const sum = sums.add(sent)) {
      staged.sums.push_back({&entry, sum});
    }
    staged.held.push_back(pinned(size));
    copyBytes(staged.held.back(), 0, sent.storage, sent.begin, size);
    entry.bytes.data = staged.held.back().data();
  }
  if (sums.memory()) {
    staged.held.push_back(sums.memory());
  }
}

// A piece may cover several storages, so that not each of them needs an event.
void copyInPieces(const Large& large, Launcher* launcher, Staged& staged) {
  uint64_t offset = 0;
  uint64_t unmarked = 0;
  std::vector<c10::Storage> held;
  for (size_t i = 0; i < large.size(); ++i) {
    wire::StorageEntry& entry = *large[i]->entry;
    const size_t size = entry.bytes.size;
    const Region sent = asSent(*large[i], size, launcher);
    const c10::Storage host = pinned(size);
    const bool isLastOfDevice =
        i + 1 == large.size() || large[i + 1]->device() != sent.device();
    held.insert(held.end(), {large[i]->storage, sent.storage, host});
    for (size_t at = 0; at < size; at += kPieceBytes) {
      const size_t piece = std::min(kPieceBytes, size - at);
      copyBytes(host, at, sent.storage, sent.begin + at, piece);
      unmarked += piece;
      if (unmarked >= kPieceBytes || (isLastOfDevice && at + piece == size)) {
        // Until the storage ends, its next pieces hold the same memory too.
        staged.filling->add(
            currentStream(sent.device()), std::exchange(unmarked, 0), held);
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
  Large large;
  for (const Departing& departing : storages) {
    wire::StorageEntry& entry = *departing.entry;
    if (entry.beside || entry.bytes.size == 0) {
      continue;
    }
    if (entry.bulk) {
      large.push_back(&departing);
    } else {
      const auto index = departing.device().index();
      append(groups[index], departing, entry.dtype);
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
      staged.filling->add(currentStream(slices.front().device()), 0, {host});
    }
  }
  if (inPieces) {
    copyInPieces(large, options.launcher, staged);
  } else {
    copyWhole(large, options, staged);
  }
}

Unstaged unstage(
    const std::vector<Arriving>& storages,
    const UnstageOptions& options) {
  Unstaged result;
  result.storages.reserve(storages.size());
  Groups groups;
  std::map<c10::DeviceIndex, std::vector<const c10::Storage*>> sources;
  for (size_t i = 0; i < storages.size(); ++i) {
    const Arriving& arriving = storages[i];
    if (arriving.landed) {
      result.storages.push_back(arriving.landed);
      result.sums.push_back(
          {i,
           arriving.device,
           arriving.host,
           options.sums == nullptr ? nullptr
                                   : options.sums->add(arriving.landed)});
      continue;
    }
    const size_t size = arriving.host.nbytes();
    result.storages.push_back(
        allocate(arriving.device, size * wire::widening(arriving.dtype)));
    const c10::Storage& target = result.storages.back();
    if (size == 0) {
      continue;
    }
    if (arriving.isPinned) {
      const uint64_t* const sum =
          toDevice(arriving.host, {{target, 0, arriving.dtype}}, options);
      result.sums.push_back({i, arriving.device, arriving.host, sum});
    } else {
      const auto index = arriving.device.index();
      append(groups[index], target, arriving.dtype);
      sources[index].push_back(&arriving.host);
    }
  }
  for (const auto& [index, slices] : groups) {
    const c10::Storage host = pinned(blockSize(slices));
    for (size_t i = 0; i < slices.size(); ++i) {
      const c10::Storage& from = *sources[index][i];
      std::memcpy(at(host, slices[i].offset), from.data(), from.nbytes());
    }
    const uint64_t* const sum = toDevice(host, slices, options);
    result.sums.push_back({std::nullopt, slices[0].device(), host, sum});
  }
  return result;
}

} // namespace torch_rpc_ext::agent::device
