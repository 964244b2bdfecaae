#pragma once

#include "base/buffer.h"

#include <cstdint>

namespace torch_rpc_ext::base {

// A 64-bit checksum. It detects faults of hardware and software; it does not
// stop an attacker, who can compute it too. The kernel in
// torch_rpc_ext/kernels/integrity.py computes the same value on a GPU.
uint64_t checksum(ConstSpan bytes);

} // namespace torch_rpc_ext::base
