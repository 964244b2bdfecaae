#pragma once

#include <cstdint>

namespace torch_rpc_ext::transport::ucx {

// Whether UCX could listen at this TCP port: no socket of this host has the
// port, on any address. The answer may have changed a moment later.
bool isFree(uint16_t port);

} // namespace torch_rpc_ext::transport::ucx
