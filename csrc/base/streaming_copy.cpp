#include "base/streaming_copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace torch_rpc_ext::base {

#ifdef __SSE2__

namespace {

constexpr size_t kLine = 64; // bytes
// How far ahead to prefetch: about as many bytes as are copied while one access
// to memory takes its time.
constexpr size_t kAhead = 16 * kLine;

} // namespace

void streamingCopy(void* to, const void* from, size_t size) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const auto copy = [&](size_t bytes) {
    if (bytes != 0) { // without bytes both pointers may be null
      std::memcpy(target, source, bytes);
    }
    target += bytes;
    source += bytes;
    size -= bytes;
  };
  const size_t into = reinterpret_cast<uintptr_t>(target) % kLine;
  if (into != 0) {
    copy(into + size < kLine ? size : kLine - into);
  }
  for (; size >= kLine; size -= kLine, target += kLine, source += kLine) {
    _mm_prefetch(source + kAhead, _MM_HINT_NTA);
    const auto* const line = reinterpret_cast<const __m128i*>(source);
    auto* const out = reinterpret_cast<__m128i*>(target);
    const __m128i first = _mm_loadu_si128(line);
    const __m128i second = _mm_loadu_si128(line + 1);
    const __m128i third = _mm_loadu_si128(line + 2);
    const __m128i fourth = _mm_loadu_si128(line + 3);
    _mm_stream_si128(out, first);
    _mm_stream_si128(out + 1, second);
    _mm_stream_si128(out + 2, third);
    _mm_stream_si128(out + 3, fourth);
  }
  _mm_sfence(); // streaming stores are unordered with the stores after them
  copy(size);
}

#else

void streamingCopy(void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
}

#endif

} // namespace torch_rpc_ext::base
