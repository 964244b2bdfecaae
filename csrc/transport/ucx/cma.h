#pragma once

// Cross-memory attach (CMA): one process reads another's memory with
// process_vm_readv. UCX can do this too, but never chooses CMA for endpoints
// that notice errors, and copies on the thread that holds the worker. Here the
// receiver reads, with threads of the pool, into a buffer from the cache.

#include "base/buffer.h"
#include "base/error.h"
#include "base/task.h"
#include "transport/transport.h"

#include <cstdint>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// Reads as many bytes as local[i] has from address remote[i] of process `pid`
// into local[i], with tasks on `runner`. Calls `callback` once, from the task
// that ends last.
void cmaRead(
    int32_t pid,
    const std::vector<uint64_t>& remote,
    const std::vector<base::MutableSpan>& local,
    base::TaskRunner& runner,
    Callback callback);

} // namespace torch_rpc_ext::transport::ucx
