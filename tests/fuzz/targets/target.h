#pragma once

// What every fuzz target is: a function that is given bytes of a stranger. It
// ends the process when something does not hold; the sanitizers do the same for
// what is undefined.

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

// `bytes` is `data` again: the parsers accept one encoding of each value only,
// so that what was accepted can be written as it came.
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
