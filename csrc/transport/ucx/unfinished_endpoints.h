#pragma once

#include <ucp/api/ucp.h>

namespace torch_rpc_ext::transport::ucx {

// Keeps UCX from ending this process when it cannot answer the first message of
// a peer, because the peer is dead and its shared memory is gone.
//
// UCX makes an endpoint for the answer, finds no way to the peer, and marks the
// endpoint as failed. But an endpoint without a way has no configuration yet,
// and UCX (1.18 to 1.22) reads the configuration with the highest number, far
// behind the end of the table. Nobody sends over such an endpoint, so there is
// no harm in leaving it as it is.
//
// UCX calls the function that marks an endpoint by way of its table of imported
// functions. Here the entry is replaced by a function that returns if the
// endpoint has no configuration, and else calls UCX's. A version of UCX that is
// not known here is left alone
// (docs/decisions/0032-unfinished-endpoints.md).
//
// Thread: any. Does nothing after the first call.
void guardUnfinishedEndpoints();

// True if the worker has such an endpoint. Then the worker cannot be destroyed:
// UCX would read the configuration of the endpoint again.
bool hasUnfinishedEndpoint(ucp_worker_h worker);

} // namespace torch_rpc_ext::transport::ucx
