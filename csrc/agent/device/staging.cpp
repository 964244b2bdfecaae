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
  return slices.back().offset + slices.back().storage.nbytes();
}

void append(std::vector<Slice>& slices, const c10::Storage& storage) {
  const size_t offset = slices.empty() ? 0 : aligned(blockSize(slices));
  slices.push_back({storage, offset});
}

void toHost(const std::vector<Slice>& slices, const c10::Storage& host) {
  if (slices.size() < kMinGathered) {
    for (const Slice& slice : slices) {
      copyBytes(host, slice.offset, slice.storage, 0, slice.storage.nbytes());
    }
    return;
  }
  const size_t size = blockSize(slices);
  const c10::Storage block = allocate(slices.front().storage.device(), size);
  gather(slices, block);
  copyBytes(host, 0, block, 0, size);
}

void toDevice(const c10::Storage& host, const std::vector<Slice>& slices) {
  if (slices.size() < kMinGathered) {
    for (const Slice& slice : slices) {
      copyBytes(slice.storage, 0, host, slice.offset, slice.storage.nbytes());
    }
    return;
  }
  const size_t size = blockSize(slices);
  const c10::Storage block = allocate(slices.front().storage.device(), size);
  copyBytes(block, 0, host, 0, size);
  scatter(block, slices);
}

char* at(const c10::Storage& host, size_t offset) {
  return static_cast<char*>(host.mutable_data()) + offset;
}

} // namespace

void stage(std::vector<Departing>& storages, std::vector<c10::Storage>& held) {
  Groups groups;
  std::map<c10::DeviceIndex, std::vector<wire::StorageEntry*>> entries;
  for (Departing& departing : storages) {
    wire::StorageEntry& entry = *departing.entry;
    const size_t size = departing.storage.nbytes();
    if (entry.beside || size == 0) {
      continue;
    }
    if (entry.bulk) {
      held.push_back(pinned(size));
      copyBytes(held.back(), 0, departing.storage, 0, size);
      entry.bytes.data = held.back().data();
    } else {
      const auto index = departing.storage.device().index();
      append(groups[index], departing.storage);
      entries[index].push_back(&entry);
    }
  }
  for (const auto& [index, slices] : groups) {
    held.push_back(pinned(blockSize(slices)));
    toHost(slices, held.back());
    for (size_t i = 0; i < slices.size(); ++i) {
      entries[index][i]->bytes.data = at(held.back(), slices[i].offset);
    }
  }
}

std::vector<c10::Storage> unstage(const std::vector<Arriving>& storages) {
  std::vector<c10::Storage> result;
  result.reserve(storages.size());
  Groups groups;
  std::map<c10::DeviceIndex, std::vector<const c10::Storage*>> sources;
  for (const Arriving& arriving : storages) {
    const size_t size = arriving.host.nbytes();
    result.push_back(allocate(arriving.device, size));
    if (size == 0) {
      continue;
    }
    if (arriving.isPinned) {
      copyBytes(result.back(), 0, arriving.host, 0, size);
    } else {
      append(groups[arriving.device.index()], result.back());
      sources[arriving.device.index()].push_back(&arriving.host);
    }
  }
  for (const auto& [index, slices] : groups) {
    const c10::Storage host = pinned(blockSize(slices));
    for (size_t i = 0; i < slices.size(); ++i) {
      const c10::Storage& from = *sources[index][i];
      std::memcpy(at(host, slices[i].offset), from.data(), from.nbytes());
    }
    toDevice(host, slices);
  }
  return result;
}

} // namespace torch_rpc_ext::agent::device
