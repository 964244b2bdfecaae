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
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// Who a process is, for peers on the same host.
struct ProcessIdentity {
  uint64_t bootId = 0; // hash of the kernel's boot id: the host
  uint64_t pidNamespace = 0; // inode of /proc/self/ns/pid
  int32_t pid = 0;
  uint64_t nonceAddress = 0; // where this process keeps `nonce`
  uint64_t nonce = 0;
};

ProcessIdentity identifyThisProcess(const uint64_t& nonce);

// True when `pid` means the same process to both.
bool sharesPids(const ProcessIdentity& a, const ProcessIdentity& b);

// Empty when this process can read the peer's memory, else the reason. Reads
// the nonce: a pid alone may name somebody else.
std::string whyNoCma(const ProcessIdentity& self, const ProcessIdentity& peer);

// Reads remote[i] of process `pid` into local[i] (same sizes) with tasks on
// `runner`; fires `callback` once, from the last task.
void cmaRead(
    int32_t pid,
    const std::vector<uint64_t>& remote,
    const std::vector<base::MutableSpan>& local,
    base::TaskRunner& runner,
    Callback callback);

} // namespace torch_rpc_ext::transport::ucx
