#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Elements that are sent without what lies between them: where they are, and
// the strides that they have then. Strides in elements, dimensions as torch has
// them.
struct Scattered {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  std::vector<int64_t> packedStrides;
};

// What is sent of a storage of a device: all of it, a run of its bytes, or
// elements that lie here and there.
struct Region {
  // All of it. Not explicit: what takes regions takes storages.
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
  size_t begin = 0; // of the first element, in bytes
  size_t bytes = 0; // of all elements
  std::shared_ptr<const Scattered> scattered; // null if they follow each other
};

} // namespace torch_rpc_ext::agent::device
