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

// DeviceIndex -> slices of the block of that device.
using Groups = std::map<c10::DeviceIndex, std::vector<Slice>>;

size_t blockSize(const std::vector<Slice>& slices) {
  return slices.back().offset + slices.back().size();
}

void append(
    std::vector<Slice>& slices,
    const Region& region,
    wire::WireDtype dtype) {
  const size_t offset = slices.empty() ? 0 : aligned(blockSize(slices));
  slices.push_back({region, offset, dtype});
}

// Whether each is copied on its own, without a block.
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
  const c10::Storage block = allocate(slices.front().device(), size);
  copyBytes(block, 0, host, 0, size);
  scatter(block, slices, launcher);
}

char* at(const c10::Storage& host, size_t offset) {
  return static_cast<char*>(host.mutable_data()) + offset;
}

// Has a device compute checksums, of what it is about to copy to the host.
class Summing {
 public:
  Summing(const StageOptions& options, size_t most, Staged& staged)
      : launcher_(options.checked ? options.launcher : nullptr),
        most_(most),
        staged_(staged) {}

  void add(const wire::StorageEntry& entry, const Region& region) {
    if (launcher_ == nullptr) {
      return;
    }
    if (next_ == nullptr) {
      memory_ = pinned(most_ * sizeof(uint64_t));
      next_ = static_cast<uint64_t*>(memory_.mutable_data());
      staged_.held.push_back(memory_);
    }
    if (!launcher_->checksum(region, next_)) {
      return;
    }
    staged_.sums.push_back({&entry, next_++});
    // Torch does not know that a device writes there.
    const auto& memory = memory_.data_ptr();
    at::getHostAllocator(kType)->record_event(
        memory.get(),
        memory.get_context(),
        c10::impl::VirtualGuardImpl(kType).getStream(region.device()));
  }

 private:
  Launcher* const launcher_;
  const size_t most_;
  Staged& staged_;
  c10::Storage memory_;
  uint64_t* next_ = nullptr;
};

// The bytes of a large one, as they travel: where they are, unless they are
// narrowed or scattered.
Region asSent(const Departing& departing, size_t size, Launcher* launcher) {
  const wire::WireDtype dtype = departing.entry->dtype;
  if (dtype == wire::WireDtype::kFloat32 && departing.scattered == nullptr) {
    return departing;
  }
  const c10::Storage block = allocate(departing.device(), size);
  gather({{departing, 0, dtype}}, block, launcher);
  return block;
}

} // namespace

void stage(
    std::vector<Departing>& storages,
    const StageOptions& options,
    Staged& staged) {
  Groups groups;
  std::map<c10::DeviceIndex, std::vector<wire::StorageEntry*>> entries;
  Summing summing(options, storages.size(), staged);
  for (Departing& departing : storages) {
    wire::StorageEntry& entry = *departing.entry;
    const size_t size = entry.bytes.size;
    if (entry.beside || size == 0) {
      continue;
    }
    if (entry.bulk) {
      const Region sent = asSent(departing, size, options.launcher);
      summing.add(entry, sent);
      staged.held.push_back(pinned(size));
      copyBytes(staged.held.back(), 0, sent.storage, sent.begin, size);
      entry.bytes.data = staged.held.back().data();
    } else {
      const auto index = departing.device().index();
      append(groups[index], departing, entry.dtype);
      entries[index].push_back(&entry);
    }
  }
  for (const auto& [index, slices] : groups) {
    staged.held.push_back(pinned(blockSize(slices)));
    const c10::Storage& host = staged.held.back();
    toHost(slices, host, options.launcher);
    for (size_t i = 0; i < slices.size(); ++i) {
      entries[index][i]->bytes.data = at(host, slices[i].offset);
    }
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
