#pragma once

#include "agent/agent_options.h"
#include "transport/transport.h"

#include <memory>

namespace torch_rpc_ext::agent {

// Make the transports: the only code that knows which ones there are.
// makeRemoteContext() throws RpcError.
std::shared_ptr<transport::Context> makeRemoteContext(const AgentOptions&);
std::shared_ptr<transport::Context> makeLoopbackContext(const AgentOptions&);

} // namespace torch_rpc_ext::agent
