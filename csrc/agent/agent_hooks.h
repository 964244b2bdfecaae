#pragma once

#include "agent/executor.h"
#include "cuda/kernels.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rref_impl.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace torch_rpc_ext::agent {

using RRefs = std::vector<c10::intrusive_ptr<torch::distributed::rpc::RRef>>;
// Reads from a response what the remote function raised; null where the
// response holds a result.
using ExceptionDecoder =
    std::function<std::exception_ptr(const torch::distributed::rpc::Message&)>;
// Makes a response of what a function's future has failed with; null where that
// is no Python exception.
using ExceptionEncoder =
    std::function<c10::intrusive_ptr<torch::distributed::rpc::Message>(
        const std::exception_ptr&)>;

// What Python does for the agent. Each hook but checkInterrupt may be null.
struct AgentHooks {
  // Runs before the first message is served.
  std::function<void()> start;
  // Called again and again while a thread of the user waits, without locks and
  // without the GIL; throws to end the wait.
  std::function<void()> checkInterrupt = [] {};
  // See Executor::setThreadScope().
  Executor::ThreadScope threadScope;
  // Drops references to values that may be Python objects.
  std::function<void(RRefs)> dropValues;
  // Release the RRefs in the payload (payloadWithRRefs()) of a message that no
  // worker will read: `undelivered` of a message by this worker, `unread` of a
  // message to this worker.
  std::function<void(const std::string&)> undelivered;
  std::function<void(const std::string&)> unread;
  // If null, upstream's code decodes exceptions, and keeps only some of their
  // types.
  ExceptionDecoder decodeException;
  // If null, the caller gets the text of the exception.
  ExceptionEncoder encodeException;
  // See device::Launcher.
  cuda::PtxSource kernels;
};

} // namespace torch_rpc_ext::agent
