#pragma once

#include "agent/executor.h"
#include "cuda/kernels.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rref_impl.h>

#include <exception>
#include <functional>
#include <vector>

namespace torch_rpc_ext::agent {

using RRefs = std::vector<c10::intrusive_ptr<torch::distributed::rpc::RRef>>;
// Looks into responses for what the remote function raised; null for a result.
using ExceptionDecoder =
    std::function<std::exception_ptr(const torch::distributed::rpc::Message&)>;

// What the agent asks of Python. Each may be null.
struct AgentHooks {
  // Runs before the first message is served.
  std::function<void()> start;
  // Called every 100 ms while join() waits; throws to end it.
  std::function<void()> checkInterrupt;
  // See Executor.
  Executor::ThreadScope threadScope;
  // Lets go of values that may be Python's.
  std::function<void(RRefs)> dropValues;
  // Without it upstream's code decodes, which keeps only some types.
  ExceptionDecoder decodeException;
  // See device::Launcher.
  cuda::PtxSource kernels;
};

} // namespace torch_rpc_ext::agent
