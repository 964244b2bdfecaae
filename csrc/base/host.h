#pragma once

#include <cstdint>

namespace torch_rpc_ext::base {

// A hash of the kernel's boot id, which is the same for all processes of a
// host, also in containers. If the id cannot be read: the hash of "".
uint64_t bootId();

// Inode of /proc/self/ns/`kind`, e.g. "pid" or "ipc"; 0 if it cannot be read.
uint64_t namespaceOf(const char* kind);

} // namespace torch_rpc_ext::base
