#pragma once

#include <cstddef>

namespace torch_rpc_ext::base {

// As std::memcpy(), for more bytes than the caches hold: its stores go straight
// to memory. An ordinary store first reads the cache line that it replaces, a
// third of all traffic, and evicts other data from the caches. glibc's memcpy()
// avoids that too, but only within a single call of many MiB.
// No other thread may access `to` until this returns.
void streamingCopy(void* to, const void* from, size_t size);

} // namespace torch_rpc_ext::base
