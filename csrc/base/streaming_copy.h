#pragma once

#include <cstddef>

namespace torch_rpc_ext::base {

// As std::memcpy(), for more bytes than the caches hold: what is written goes
// straight to memory. An ordinary store first reads the line that it replaces,
// a third of all traffic, and drives out what others have in the caches.
// glibc's memcpy() does the same, but only for a single call of many MiB.
// Nobody else may touch `to` until it returns.
void streamingCopy(void* to, const void* from, size_t size);

} // namespace torch_rpc_ext::base
