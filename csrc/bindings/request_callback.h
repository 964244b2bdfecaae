#pragma once

#include "agent/allow_list.h"

#include <torch/csrc/distributed/rpc/request_callback.h>

#include <memory>
#include <string>

namespace torch_rpc_ext::bindings {

// Makes what runs the requests of peers: upstream's RequestCallbackImpl, which
// here asks `allowed` before it runs a builtin operator or a TorchScript
// function, also one inside of a message of autograd or of the profiler.
// `worker` is this worker's name, for the texts of errors.
std::unique_ptr<torch::distributed::rpc::RequestCallback> makeRequestCallback(
    agent::AllowList allowed,
    std::string worker);

} // namespace torch_rpc_ext::bindings
