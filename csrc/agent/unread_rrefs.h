#pragma once

#include "agent/agent_hooks.h"
#include "agent/executor.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <functional>
#include <memory>
#include <string>

namespace torch_rpc_ext::agent {

// Releases the RRefs in messages that no worker reads. Without this, their
// owners would keep the values for ever: torch counts an RRef when the RRef is
// written into a message, and waits for the reader to confirm it.
//
// Owns: nothing; runs the hooks on threads of the pool, as they need the GIL.
// Thread: any.
// Outlives: the threads of the pool.
class UnreadRRefs {
 public:
  using Message = torch::distributed::rpc::Message;
  using Payload = std::unique_ptr<std::string>;

  // The executor outlives it.
  UnreadRRefs(Executor& executor, AgentHooks& hooks);

  // For a message of this worker: `payload` is payloadWithRRefs() of it.
  void undelivered(Payload payload);
  void undelivered(const Message& message);
  // For a message to this worker.
  void unread(const Message& message);

 private:
  using Hook = std::function<void(const std::string&)>;

  void runLater(const Hook& hook, Payload payload);

  Executor& executor_;
  const Hook undelivered_;
  const Hook unread_;
};

} // namespace torch_rpc_ext::agent
