#pragma once

#include "agent/allow_list.h"

#include <torch/csrc/distributed/rpc/request_callback.h>

#include <memory>
#include <string>

namespace torch_rpc_ext::bindings {

// What runs the requests of peers: upstream's, which asks `allowed` before it
// runs a builtin operator or a TorchScript function, also inside of messages of
// autograd and of the profiler. `worker` is the name of this one, for texts.
std::unique_ptr<torch::distributed::rpc::RequestCallback> makeRequestCallback(
    agent::AllowList allowed,
    std::string worker);

} // namespace torch_rpc_ext::bindings
