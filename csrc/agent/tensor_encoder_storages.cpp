// TensorEncoder's storages: collects them, and decides which bytes of each are
// sent, and as which dtype.

#include "agent/host_storage.h"
#include "agent/tensor_encoder.h"
#include "agent/wire_dtype.h"

#include <ATen/ExpandUtils.h>

#include <memory>
#include <utility>

namespace torch_rpc_ext::agent {

using base::Error;
using base::Result;

namespace {

// Up to so many storages a scan is faster than a hash table.
constexpr size_t kMaxScan = 16;

} // namespace

// Adds a tensor on a device without the rest of its storage. The copy from the
// device packs its bytes if they are scattered.
Error TensorEncoder::addExcerpt(const at::Tensor& tensor, bool requiresGrad) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  c10::SmallVector<wire::Dim, 8> dims;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    dims.push_back({tensor.size(i), tensor.stride(i)});
  }
  if (auto error = checkReach(
          tensor.storage_offset(),
          {dims.data(), dims.size()},
          tensor.scalar_type(),
          storage.nbytes())) {
    return error;
  }
  auto place = route_.placeOf(storage.device());
  if (!place.ok()) {
    return place.error();
  }
  device::Region region(
      storage,
      tensor.storage_offset() * tensor.itemsize(),
      tensor.numel() * tensor.itemsize());
  std::vector<int64_t> packed = tensor.strides().vec();
  if (!tensor.is_non_overlapping_and_dense()) {
    packed = at::infer_dense_strides(tensor.sizes(), tensor.strides());
    region.scattered =
        std::make_shared<const device::Scattered>(device::Scattered{
            tensor.scalar_type(),
            tensor.sizes().vec(),
            tensor.strides().vec(),
            packed});
  }
  const auto index = static_cast<uint32_t>(storages_.size());
  const size_t size = region.bytes;
  departing_.emplace_back(index, std::move(region));
  addEntry(nullptr, {nullptr, size}, size > inlineThreshold_, place.value());
  addRecord(tensor, requiresGrad, index, /*offset=*/0, packed);
  return {};
}

Result<uint32_t> TensorEncoder::addStorage(const c10::Storage& storage) {
  const c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
  const auto next = static_cast<uint32_t>(keys_.size());
  if (next <= kMaxScan) {
    for (uint32_t i = 0; i < next; ++i) {
      if (keys_[i] == key) {
        return i;
      }
    }
  } else if (const auto found = index_.find(key); found != index_.end()) {
    return found->second;
  }

  const size_t size = storage.nbytes();
  if (storage.device().is_meta()) {
    addEntry(key, {nullptr, size}, /*bulk=*/false, wire::kMetaPlace);
    return next;
  }
  wire::DevicePlace place = wire::kHostPlace;
  if (route_.map != nullptr || !storage.device().is_cpu()) {
    auto mapped = route_.placeOf(storage.device());
    if (!mapped.ok()) {
      return mapped.error();
    }
    place = mapped.value();
  }
  if (!storage.device().is_cpu()) {
    departing_.emplace_back(next, storage);
    addEntry(key, {nullptr, size}, size > inlineThreshold_, place);
    return next;
  }
  const void* data = storage.data();
  if (data == nullptr && size != 0) {
    return fail("has no data (a wrapper subclass, or a freed storage)");
  }
  const bool bulk = size > inlineThreshold_;
  if (bulk) {
    if (storage.data_ptr().get_context() == nullptr) {
      // from_blob() without a deleter: the memory's owner may free the memory
      // as soon as the call returns.
      owners_.push_back(copyBytesOf({data, size}));
      data = owners_.back().data();
    } else {
      owners_.push_back(storage);
    }
  }
  addEntry(key, {data, size}, bulk, place);
  return next;
}

void TensorEncoder::addEntry(
    const c10::StorageImpl* key,
    base::ConstSpan bytes,
    bool bulk,
    wire::DevicePlace place) {
  storages_.push_back({bytes, bulk, /*beside=*/false, place});
  keys_.push_back(key);
  exact_.push_back(false);
  if (keys_.size() > kMaxScan) {
    addToIndex();
  }
}

// Adds the storages that index_ does not have yet.
void TensorEncoder::addToIndex() {
  for (; indexed_ < keys_.size(); ++indexed_) {
    if (keys_[indexed_] != nullptr) {
      index_.emplace(keys_[indexed_], static_cast<uint32_t>(indexed_));
    }
  }
}

// Which storages contain parts of sparse or quantised tensors: the receiver
// looks at those bytes.
std::vector<bool> TensorEncoder::checkedStorages() const {
  std::vector<bool> checked(storages_.size());
  uint32_t parts = 0;
  for (const auto& record : records_) {
    if (parts > 0) {
      --parts;
      checked[record.aux] = true;
    } else {
      parts = wire::partsOf(record.layout);
    }
  }
  return checked;
}

Error TensorEncoder::narrow(wire::WireDtype dtype, memory::BufferCache* cache) {
  if (dtype == wire::WireDtype::kFloat32) {
    return {};
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    const size_t size = storages_[i].bytes.size;
    if (exact_[i] || size == 0 || size % sizeof(float) != 0 ||
        storages_[i].place == wire::kMetaPlace) {
      continue;
    }
    if (auto error = narrowOne(i, dtype, cache)) {
      return error;
    }
  }
  return {};
}

Error TensorEncoder::narrowOne(
    size_t index,
    wire::WireDtype dtype,
    memory::BufferCache* cache) {
  wire::StorageEntry& entry = storages_[index];
  const base::ConstSpan floats = entry.bytes;
  entry.dtype = dtype;
  entry.bytes.size /= wire::widening(dtype);
  entry.bulk = entry.bytes.size > inlineThreshold_;
  if (floats.data == nullptr) {
    return {}; // on a device, which narrows it
  }
  auto memory = allocateOnHost(cache, entry.bytes.size);
  if (!memory.ok()) {
    return memory.error();
  }
  owners_.push_back(std::move(memory.value()));
  void* const bytes = owners_.back().mutable_data();
  agent::narrow(floats, dtype, {bytes, entry.bytes.size});
  entry.bytes.data = bytes;
  return {};
}

std::vector<device::Departing> TensorEncoder::takeDeparting() {
  std::vector<device::Departing> result;
  result.reserve(departing_.size());
  const std::vector<bool> checked = checkedStorages();
  for (auto& [index, region] : departing_) {
    result.push_back({std::move(region), &storages_[index], checked[index]});
  }
  return result;
}

} // namespace torch_rpc_ext::agent
