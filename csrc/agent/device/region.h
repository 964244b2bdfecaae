#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Elements of a tensor that are not contiguous, and are sent packed: where they
// are now, and their strides after packing. Strides are in elements; the order
// of dimensions is torch's.
struct Scattered {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  std::vector<int64_t> packedStrides;
};

// The part of a device's storage that is sent: all of it, a run of its bytes,
// or scattered elements.
struct Region {
  // The whole storage. Not explicit, so that a storage can be passed where a
  // Region is wanted.
  Region(c10::Storage whole) // NOLINT(google-explicit-constructor)
      : storage(std::move(whole)), bytes(storage.nbytes()) {}
  Region(c10::Storage of, size_t from, size_t size)
      : storage(std::move(of)), begin(from), bytes(size) {}

  uintptr_t address() const {
    return reinterpret_cast<uintptr_t>(storage.data()) + begin;
  }
  c10::Device device() const {
    return storage.device();
  }

  c10::Storage storage;
  size_t begin = 0; // offset of the first element, in bytes
  size_t bytes = 0; // of all elements
  std::shared_ptr<const Scattered> scattered; // null for a run of bytes
};

} // namespace torch_rpc_ext::agent::device
