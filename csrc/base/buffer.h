#pragma once

#include <cstddef>
#include <cstring>
#include <memory>

namespace torch_rpc_ext::base {

// Owns a block of bytes, uninitialised at first. Can be moved, not copied.
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

// Memory to read, which the span does not own.
struct ConstSpan {
  const void* data = nullptr;
  size_t size = 0;
};

inline Buffer copyOf(ConstSpan bytes) {
  Buffer copy(bytes.size);
  if (bytes.size != 0) {
    std::memcpy(copy.data(), bytes.data, bytes.size);
  }
  return copy;
}

// Memory to write, which the span does not own.
struct MutableSpan {
  void* data = nullptr;
  size_t size = 0;
};

} // namespace torch_rpc_ext::base
