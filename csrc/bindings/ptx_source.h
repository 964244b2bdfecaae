#pragma once

#include "cuda/kernels.h"

namespace torch_rpc_ext::bindings {

// torch_rpc_ext.kernels.ptx.compile_kernel, imported at its first use. Takes
// the GIL: to be called without locks. Without numba-cuda it fails with
// kUnsupported.
cuda::PtxSource pythonPtxSource();

} // namespace torch_rpc_ext::bindings
