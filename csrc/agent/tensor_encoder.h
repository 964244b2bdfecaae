#pragma once

#include "agent/device/tables.h"
#include "agent/device/way.h"
#include "base/error.h"
#include "memory/buffer_cache.h"
#include "wire/call_frame.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

// Describes tensors as storages and records of a call frame. Part of codec.h.
//
// Owns: the copies it makes, and the storages that are on devices; the tensors
//   outlive it.
// Thread: one.
class TensorEncoder {
 public:
  TensorEncoder(uint64_t inlineThreshold, const device::Route& route)
      : inlineThreshold_(inlineThreshold), route_(route) {}

  // Fails with kInvalid; may throw c10::Error.
  base::Error add(const at::Tensor& tensor);

  std::span<const wire::StorageEntry> storages() const {
    return {storages_.data(), storages_.size()};
  }
  std::span<const wire::TensorRecord> records() const {
    return {records_.data(), records_.size()};
  }
  std::span<const wire::Dim> dims() const {
    return {dims_.data(), dims_.size()};
  }
  // Lets a storage travel as `dtype` if all tensors over it are float32. To be
  // called once, after the last add(). `cache` as in EncodeOptions. Fails with
  // kOverloaded; may throw c10::Error.
  base::Error narrow(wire::WireDtype dtype, memory::BufferCache* cache);
  // The storages that are on devices: their entries have no bytes yet. To be
  // called once, after narrow().
  std::vector<device::Departing> takeDeparting();
  // The copies, and the storages that travel as bulk.
  std::vector<c10::Storage> takeOwners() {
    return std::move(owners_);
  }

 private:
  // Whether the caller of add() holds the storage of the tensor until the frame
  // is written.
  enum class Held : bool { kNo, kYes };

  base::Error
  addCompact(const at::Tensor& tensor, bool requiresGrad, Held held);
  base::Error
  addStrided(const at::Tensor& tensor, bool requiresGrad, Held held);
  base::Error addExcerpt(const at::Tensor& tensor, bool requiresGrad);
  void addRecord(
      const at::Tensor& tensor,
      bool requiresGrad,
      uint32_t storage,
      int64_t offset,
      c10::IntArrayRef strides);
  base::Error checkReach(
      int64_t offset,
      std::span<const wire::Dim> dims,
      c10::ScalarType dtype,
      uint64_t available) const;
  base::Error addPart(const at::Tensor& tensor);
  base::Error addSparse(const at::Tensor& tensor);
  base::Error addQuantized(const at::Tensor& tensor);
  void addShape(
      wire::TensorRecord record,
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides);
  base::Result<uint32_t> addStorage(const c10::Storage& storage);
  void addEntry(
      const c10::StorageImpl* key,
      base::ConstSpan bytes,
      bool bulk,
      wire::DevicePlace place);
  void addToIndex();
  std::vector<bool> checkedStorages() const;
  base::Error
  narrowOne(size_t index, wire::WireDtype dtype, memory::BufferCache* cache);
  base::Error fail(const std::string& why) const;

  const uint64_t inlineThreshold_;
  const device::Route route_; // what it refers to lives until the last add()
  uint64_t tensors_ = 0;
  c10::SmallVector<wire::StorageEntry, 8> storages_;
  // Parallel to storages_: the storage of the entry; null for a part of one.
  c10::SmallVector<const c10::StorageImpl*, 8> keys_;
  // Parallel to storages_: whether the storage must not be narrowed, because a
  // tensor over it is not float32, or has to arrive exactly.
  c10::SmallVector<bool, 8> exact_;
  bool addsExact_ = false;
  // Used for more than kMaxScan storages; has the first indexed_ of keys_.
  ska::flat_hash_map<const c10::StorageImpl*, uint32_t> index_;
  size_t indexed_ = 0;
  c10::SmallVector<wire::TensorRecord, 8> records_;
  c10::SmallVector<wire::Dim, 16> dims_;
  std::vector<c10::Storage> owners_;
  // What is on devices, each with its index in storages_.
  std::vector<std::pair<uint32_t, device::Region>> departing_;
};

} // namespace torch_rpc_ext::agent
