#pragma once

#include "agent/agent_hooks.h"
#include "agent/agent_metrics.h"
#include "agent/agent_options.h"
#include "agent/executor.h"
#include "agent/load_limits.h"
#include "agent/peers.h"
#include "agent/pending_calls.h"
#include "agent/unread_rrefs.h"
#include "base/synchronized.h"
#include "metrics/call_log.h"
#include "metrics/counters.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>

namespace torch_rpc_ext::agent {

// The calls of this worker, from begin() until their futures hold an answer or
// an error.
//
// Owns: the calls and their deadlines, the limits of calls in flight, the log
//   of calls sent.
// Thread: any.
// Outlives: nothing; pending().stop() detaches it from the Poller.
class OpenCalls {
 public:
  // The references outlive it.
  OpenCalls(
      const AgentOptions& options,
      Executor& executor,
      metrics::Counters& counters,
      const Peers& peers,
      UnreadRRefs& unreadRRefs,
      const AgentHooks& hooks);

  // Counts a call of this thread. The call has to end, by withdraw(), finish(),
  // fail() or failLater().
  void begin(PendingCall& call);
  // Waits until the limits of calls in flight leave room for the call
  // (LoadLimits). Only calls of users' functions wait. After failAll(), fails.
  // If checkInterrupt() of the hooks ends the wait, throws, and the call has
  // ended.
  base::Error limit(
      PendingCall& call,
      const torch::distributed::rpc::Message& message);
  // The calls that wait for an answer, their deadline, or the end of their
  // connection.
  PendingCalls& pending() {
    return pending_;
  }
  const PendingCalls& pending() const {
    return pending_;
  }
  // Removes a call as if it had never been made.
  void withdraw(uint64_t callId);

  // Completes the future with an answer, which may be an error. Where this
  // throws, the call still has its future, and is to be given to fail().
  void finish(
      PendingCall& call,
      c10::intrusive_ptr<torch::distributed::rpc::Message> message);
  // See PendingCalls::setSent().
  [[nodiscard]] bool setSent(
      uint64_t callId,
      const transport::ConnectionPtr& connection,
      UntakenPtr untaken);
  // The connection is done with the frame of a request with RRefs; see
  // Connection::send(). Releases the RRefs if the callee does not read the
  // request. If there is an error, the call, which may have ended, is still to
  // be failed.
  void sendEnded(
      uint64_t callId,
      const std::weak_ptr<transport::Connection>& connection,
      const base::Error& error);
  // Notes what an answer says of whether the callee has read the request.
  // Called for calls with RRefs, and for calls that have ended already. `type`
  // is that of the answer's message.
  void answered(uint64_t callId, int type);
  void fail(PendingCall call, const base::Error& error);
  // As fail(), on a thread of the pool, because callbacks of the future may run
  // the user's code.
  void failLater(PendingCall call, const base::Error& error);
  // Fails the calls that were sent over `connection`.
  void failAll(const transport::Connection* connection, const base::Error&);
  // Fails all calls, also those that wait in limit(), and all further ones.
  // None throws: an RRef that dies after this makes a call, too.
  void failAll(const base::Error& error);

  // Waits until a call ends, for `patience` at most, unless none is open.
  // Returns how many are open.
  int64_t waitUntilNone(std::chrono::milliseconds patience);

  metrics::CallLog& log() {
    return log_;
  }
  void addTo(Metrics& metrics) const;

 private:
  // Ends a call whose request nobody will read.
  void drop(PendingCall& call);
  void failed(PendingCall& call, std::exception_ptr why);
  // The call no longer counts in the limits. Before its future is completed,
  // because a callback of the future may make the next call, and wait for room.
  void makeRoom(PendingCall& call);
  void ended(PendingCall& call);
  void note(const PendingCall& call, bool failed);

  Executor& executor_;
  metrics::Counters& counters_;
  const Peers& peers_;
  UnreadRRefs& unreadRRefs_;
  const ExceptionDecoder decodeException_;
  const std::function<void()> checkInterrupt_;
  LoadLimits load_;
  metrics::CallLog log_;
  base::Synchronized<uint64_t> ended_; // how many calls have ended so far
  std::condition_variable endedChanged_;
  PendingCalls pending_; // last: its deadlines use the others
};

} // namespace torch_rpc_ext::agent
