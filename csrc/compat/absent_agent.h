#pragma once

namespace torch_rpc_ext::compat {

// Lets go of the agent of a group that has ended, which upstream's RRefContext
// keeps until RRefs get a new agent: the new one may need its ports. To be
// called while no agent is the current one, before a new one is made. Until the
// new one starts, what RRefs ask of their agent raises "RPC is not
// initialized".
void letFormerAgentGo();

} // namespace torch_rpc_ext::compat
