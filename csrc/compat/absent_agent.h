#pragma once

namespace torch_rpc_ext::compat {

// Lets go of the agent of a group that has ended. Upstream's RRefContext keeps
// that agent, with its ports, until RRefs get a new one, which may need the
// ports. To be called while no agent is the current one, before a new agent is
// made. Until the new agent starts, calls for RRefs raise "RPC is not
// initialized".
void letFormerAgentGo();

} // namespace torch_rpc_ext::compat
