#pragma once

#include "agent/agent_hooks.h"
#include "agent/executor.h"
#include "agent/failure_message.h"
#include "base/error.h"
#include "base/synchronized.h"
#include "transport/transport.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

namespace torch_rpc_ext::agent {

// Whether the peer has not read a message whose send ended with `error`:
// because the message has not left, or because the peer refused the bulk. Else
// the peer may have read the message. `isOpen`: the connection has not ended.
bool meansUnread(const base::Error& error, bool isOpen);

// Releases the RRefs in messages that no worker reads. Without this, their
// owners would keep the values for ever: torch counts an RRef when the RRef is
// written into a message, and waits for the reader to confirm it.
//
// Owns: the payloads of requests that were sent, until it is known whether they
//   are read; runs the hooks on threads of the pool, as they need the GIL.
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

  // A request, whose payloadWithRRefs() is not null, is about to be given to
  // the connection. The functions below say what becomes of the request,
  // whether or not its caller waits.
  void sent(
      uint64_t callId,
      const transport::Connection* connection,
      Payload payload);
  // Says whether the callee has read the request. Does nothing for calls that
  // were not given to sent().
  void judged(uint64_t callId, Read read);
  // The connection is done with the request, and the peer may have read it.
  void sendEnded(uint64_t callId);
  // A connection has ended. If the peer is gone, it will not read the requests
  // that were sent over the connection, or has lost what it read. A peer that
  // lives may use what it has read: its requests are forgotten. But a request
  // for which neither judged() nor sendEnded() was called is kept until then.
  void ended(const transport::Connection* connection, bool gone);

 private:
  using Hook = std::function<void(const std::string&)>;

  struct Request {
    const transport::Connection* connection; // null once it has ended
    Payload payload;
    bool sendEnded = false;
  };

  void runLater(const Hook& hook, Payload payload);

  Executor& executor_;
  const Hook undelivered_;
  const Hook unread_;
  base::Synchronized<std::unordered_map<uint64_t, Request>> requests_;
};

} // namespace torch_rpc_ext::agent
