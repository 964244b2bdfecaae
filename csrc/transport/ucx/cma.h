#pragma once

// Cross-memory attach: one process reads another's memory with
// process_vm_readv. UCX has it too, but never chooses it for endpoints that
// notice errors, and copies on the thread that holds the worker. We let the
// receiver read, on the pool, into a buffer from the cache.

#include "base/buffer.h"
#include "base/error.h"
#include "base/task.h"
#include "transport/transport.h"

#include <cstdint>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// Reads remote[i] of process `pid` into local[i] (same sizes) with tasks on
// `runner`; fires `callback` once, from the last task.
void cmaRead(
    int32_t pid,
    const std::vector<uint64_t>& remote,
    const std::vector<base::MutableSpan>& local,
    base::TaskRunner& runner,
    Callback callback);

} // namespace torch_rpc_ext::transport::ucx
