#include "base/checksum.h"

#include "base/bytes.h"

#include <cstddef>
#include <cstring>

// The loop is 5 times as fast with the 64-bit multiplications of AVX-512, which
// the x86-64 baseline lacks. So the compiler makes one clone per instruction
// set, and the loader picks the best clone that this CPU can run.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TORCH_RPC_EXT_VECTORISED \
  __attribute__((                \
      target_clones("arch=x86-64-v4", "avx2", "default"), optimize("O3")))
#else
#define TORCH_RPC_EXT_VECTORISED
#endif

namespace torch_rpc_ext::base {

namespace {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;

// SplitMix64's finaliser. Inlined, so that each clone of the loop below
// compiles it for its own instruction set.
[[gnu::always_inline]] inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

TORCH_RPC_EXT_VECTORISED
uint64_t sumOfWords(const std::byte* bytes, size_t words) {
  uint64_t sum = 0;
  for (size_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + i * sizeof(word), sizeof(word));
    sum += mix(detail::littleEndian(word) + (i + 1) * kGamma);
  }
  return sum;
}

} // namespace

uint64_t checksum(ConstSpan bytes) {
  constexpr size_t kWord = sizeof(uint64_t);
  const auto* const begin = static_cast<const std::byte*>(bytes.data);
  const size_t words = bytes.size / kWord;
  uint64_t sum = mix(bytes.size) + sumOfWords(begin, words);
  if (const size_t rest = bytes.size % kWord; rest != 0) {
    uint64_t word = 0;
    std::memcpy(&word, begin + words * kWord, rest);
    sum += mix(detail::littleEndian(word) + (words + 1) * kGamma);
  }
  return sum;
}

} // namespace torch_rpc_ext::base
