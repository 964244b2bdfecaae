#pragma once

#include <cstdint>

namespace torch_rpc_ext::base {

// Hash of the kernel's boot id: the same for all processes of a host, also in
// containers.
uint64_t bootId();

// Inode of /proc/self/ns/`kind`, e.g. "pid" or "ipc"; 0 if it cannot be read.
uint64_t namespaceOf(const char* kind);

} // namespace torch_rpc_ext::base
