#pragma once

#include "transport/transport.h"

#include <memory>

namespace torch_rpc_ext::transport::loopback {

// Joins contexts of one process: an agent uses a hub of its own to call itself,
// tests use one to try a protocol without a network.
class Hub;

std::shared_ptr<Hub> makeHub();
std::shared_ptr<Context> makeContext(std::shared_ptr<Hub> hub);

} // namespace torch_rpc_ext::transport::loopback
