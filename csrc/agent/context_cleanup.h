#pragma once

#include "agent/caller.h"
#include "agent/executor.h"
#include "agent/peers.h"
#include "transport/transport.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <chrono>

namespace torch_rpc_ext::agent {

// The messages CLEANUP_AUTOGRAD_CONTEXT_REQ, by which a worker that has ended a
// distributed autograd context asks the workers that it has called in this
// context to end the context, too. torch lets each of those workers send the
// same message to all workers that it knows in the context, the worker that
// asked included. That message back is not sent. In its place, the worker that
// asked ends the context a second time when it gets the answer. (An answer of a
// call within the context may have made the context again, if the program left
// the context before.)
//
// Owns: nothing; the request that a thread serves is thread_local.
// Thread: any.
// Outlives: the futures of its messages.
class ContextCleanup {
 public:
  using WorkerInfo = torch::distributed::rpc::WorkerInfo;
  using Message = torch::distributed::rpc::Message;
  using JitFuture = torch::distributed::rpc::JitFuture;

  // The references outlive it.
  ContextCleanup(Executor& executor, const Peers& peers, Caller& caller)
      : executor_(executor), peers_(peers), caller_(caller) {}

  c10::intrusive_ptr<JitFuture> send(
      const WorkerInfo& to,
      const c10::intrusive_ptr<Message>& message,
      std::chrono::milliseconds timeout);

  // While a Serving lives, this thread serves `request`, which came over
  // `from`. Both outlive it.
  class Serving {
   public:
    Serving(const Message& request, const transport::Connection* from);
    ~Serving();
    Serving(const Serving&) = delete;
    Serving& operator=(const Serving&) = delete;

   private:
    friend class ContextCleanup;
    const Message& request_;
    const transport::Connection* const from_;
    const Serving* const before_;
  };

 private:
  // Whether this thread serves the same message, and got it from `to`.
  bool isBack(const WorkerInfo& to, const Message& message) const;

  Executor& executor_;
  const Peers& peers_;
  Caller& caller_;
};

} // namespace torch_rpc_ext::agent
