#pragma once

#include "transport/transport.h"

#include <memory>

namespace torch_rpc_ext::transport::loopback {

// A context that reaches only itself: it carries the calls of a worker to
// itself. Both ends of a connection are one object.
std::shared_ptr<Context> makeContext();

} // namespace torch_rpc_ext::transport::loopback
