#pragma once

#include "base/buffer.h"

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>

namespace torch_rpc_ext::base {

namespace detail {

// Converts between the host's byte order and little-endian, in both directions.
template <std::unsigned_integral T>
constexpr T littleEndian(T value) {
  if constexpr (std::endian::native == std::endian::little || sizeof(T) == 1) {
    return value;
  } else {
    T swapped = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      swapped = static_cast<T>((swapped << 8) | ((value >> (8 * i)) & 0xff));
    }
    return swapped;
  }
}

} // namespace detail

// Reads little-endian numbers, at any alignment, from bytes that a peer wrote.
// A read beyond the end sets failed() for good, and from then on every read
// gives zero. So a parser may read several numbers and check failed() once, as
// long as it does not loop up to a number that it has not checked.
// Owns: nothing; the bytes must outlive the reader.
// Thread: one.
class ByteReader {
 public:
  explicit ByteReader(ConstSpan bytes)
      : next_(static_cast<const std::byte*>(bytes.data)),
        remaining_(bytes.size) {}

  uint8_t u8() {
    return read<uint8_t>();
  }
  uint16_t u16() {
    return read<uint16_t>();
  }
  uint32_t u32() {
    return read<uint32_t>();
  }
  uint64_t u64() {
    return read<uint64_t>();
  }
  int64_t i64() {
    return static_cast<int64_t>(read<uint64_t>());
  }

  // The next `size` bytes, not copied; an empty span if fewer are left.
  ConstSpan bytes(uint64_t size) {
    if (size > remaining_) {
      fail();
      return {};
    }
    const ConstSpan span{next_, static_cast<size_t>(size)};
    next_ += size;
    remaining_ -= static_cast<size_t>(size);
    return span;
  }

  size_t remaining() const {
    return remaining_;
  }
  bool failed() const {
    return failed_;
  }

 private:
  template <std::unsigned_integral T>
  T read() {
    if (sizeof(T) > remaining_) {
      fail();
      return 0;
    }
    T value;
    std::memcpy(&value, next_, sizeof(T));
    next_ += sizeof(T);
    remaining_ -= sizeof(T);
    return detail::littleEndian(value);
  }

  void fail() {
    failed_ = true;
    remaining_ = 0;
  }

  const std::byte* next_;
  size_t remaining_;
  bool failed_ = false;
};

// Writes little-endian numbers into memory whose size was computed beforehand.
// A write beyond the end is dropped and sets failed(), which means that the
// computed size was wrong.
// Owns: nothing; the memory must outlive the writer.
// Thread: one.
class ByteWriter {
 public:
  explicit ByteWriter(Buffer& buffer)
      : next_(buffer.data()), remaining_(buffer.size()) {}
  explicit ByteWriter(MutableSpan bytes)
      : next_(static_cast<std::byte*>(bytes.data)), remaining_(bytes.size) {}

  void u8(uint8_t value) {
    write(value);
  }
  void u16(uint16_t value) {
    write(value);
  }
  void u32(uint32_t value) {
    write(value);
  }
  void u64(uint64_t value) {
    write(value);
  }
  void i64(int64_t value) {
    write(static_cast<uint64_t>(value));
  }

  void bytes(ConstSpan span) {
    if (span.size > remaining_) {
      fail();
    } else if (span.size != 0) { // memcpy may not be given null
      std::memcpy(next_, span.data, span.size);
      next_ += span.size;
      remaining_ -= span.size;
    }
  }

  size_t remaining() const {
    return remaining_;
  }
  bool failed() const {
    return failed_;
  }

 private:
  template <std::unsigned_integral T>
  void write(T value) {
    if (sizeof(T) > remaining_) {
      fail();
      return;
    }
    value = detail::littleEndian(value);
    std::memcpy(next_, &value, sizeof(T));
    next_ += sizeof(T);
    remaining_ -= sizeof(T);
  }

  void fail() {
    failed_ = true;
    remaining_ = 0;
  }

  std::byte* next_;
  size_t remaining_;
  bool failed_ = false;
};

} // namespace torch_rpc_ext::base
