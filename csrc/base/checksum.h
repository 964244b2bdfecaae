#pragma once

#include "base/buffer.h"

#include <cstdint>

namespace torch_rpc_ext::base {

// A 64-bit checksum of bytes: against faults of hardware and software, not
// against somebody who wants to forge them. The definition is that of
// torch_rpc_ext/kernels/integrity.py, whose kernel computes the same on a GPU.
uint64_t checksum(ConstSpan bytes);

} // namespace torch_rpc_ext::base
