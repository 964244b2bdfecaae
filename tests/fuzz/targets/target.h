#pragma once

// A fuzz target is a function that gets bytes as an attacker may send them. It
// aborts the process when a promise is broken; the sanitizers abort it on
// undefined behaviour.

#include "base/buffer.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace torch_rpc_ext::fuzz {

inline void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::abort();
  }
}

// Requires that `bytes` equals `data`. The parsers accept only one encoding of
// each value, so writing an accepted value must give the same bytes again.
inline void requireSame(
    base::ConstSpan bytes,
    const uint8_t* data,
    size_t size,
    const char* what) {
  require(
      bytes.size == size &&
          (size == 0 || std::memcmp(bytes.data, data, size) == 0),
      what);
}

inline base::ConstSpan spanOf(const base::Buffer& buffer) {
  return {buffer.data(), buffer.size()};
}

inline base::ConstSpan spanOf(const std::string& text) {
  return {text.data(), text.size()};
}

inline std::string toString(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

} // namespace torch_rpc_ext::fuzz
