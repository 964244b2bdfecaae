#pragma once

#include "cuda/kernels.h"

namespace torch_rpc_ext::bindings {

// Calls torch_rpc_ext.kernels.ptx.compile_kernel(), which it imports. The
// result takes the GIL, so call it without holding a lock. Fails with
// kUnsupported if numba-cuda is not installed.
cuda::PtxSource pythonPtxSource();

} // namespace torch_rpc_ext::bindings
