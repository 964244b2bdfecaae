#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace torch_rpc_ext::agent {

// The dtype with this number on the wire; nothing if torch has no such dtype.
inline std::optional<c10::ScalarType> toDtype(uint8_t number) {
  const auto dtype = static_cast<c10::ScalarType>(number);
  if (number >= static_cast<uint16_t>(c10::ScalarType::NumOptions) ||
      dtype == c10::ScalarType::Undefined) {
    return std::nullopt;
  }
  return dtype;
}

// Whether `elements` elements take at most `bytes` bytes.
inline bool fits(uint64_t elements, c10::ScalarType dtype, uint64_t bytes) {
  // Two dtypes pack several elements into one byte; elementSize() says 1 for
  // them.
  switch (dtype) {
    case c10::ScalarType::QUInt4x2:
      return elements / 2 + elements % 2 <= bytes;
    case c10::ScalarType::QUInt2x4:
      return elements / 4 + (elements % 4 != 0) <= bytes;
    default:
      return elements <= bytes / c10::elementSize(dtype);
  }
}

} // namespace torch_rpc_ext::agent
