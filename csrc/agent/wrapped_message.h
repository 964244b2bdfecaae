#pragma once

#include "base/error.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <string_view>

namespace torch_rpc_ext::agent {

// Upstream wraps a message in another one to add the context of autograd, or
// what a profiler wants to know.

// Type and payload of a message, which may be inside of another message.
struct InnerMessage {
  int type;
  std::string_view bytes;
};

// The message inside of the wrappers, or the message itself.
InnerMessage innermost(const torch::distributed::rpc::Message& message);

// The error of a message that is wrapped more often than upstream does.
// Upstream unwraps by recursion, so one that is wrapped thousands of times
// would overflow the stack.
base::Error checkWrappers(const torch::distributed::rpc::Message& message);

} // namespace torch_rpc_ext::agent
