#pragma once

#include <cstddef>
#include <memory>

namespace torch_rpc_ext::base {

// An owned, uninitialised block of bytes; moves, never copies.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size)
      : bytes_(std::make_unique_for_overwrite<std::byte[]>(size)),
        size_(size) {}
  Buffer(Buffer&& other) noexcept
      : bytes_(std::move(other.bytes_)), size_(other.size_) {
    other.size_ = 0;
  }
  Buffer& operator=(Buffer&& other) noexcept {
    bytes_ = std::move(other.bytes_);
    size_ = other.size_;
    other.size_ = 0;
    return *this;
  }

  std::byte* data() {
    return bytes_.get();
  }
  const std::byte* data() const {
    return bytes_.get();
  }
  size_t size() const {
    return size_;
  }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  size_t size_ = 0;
};

// Memory that somebody else owns, to be read.
struct ConstSpan {
  const void* data = nullptr;
  size_t size = 0;
};

// Memory that somebody else owns, to be written.
struct MutableSpan {
  void* data = nullptr;
  size_t size = 0;
};

} // namespace torch_rpc_ext::base
