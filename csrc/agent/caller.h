#pragma once

#include "agent/agent_options.h"
#include "agent/answer_wait.h"
#include "agent/arrival.h"
#include "agent/codec.h"
#include "agent/devices.h"
#include "agent/executor.h"
#include "agent/group.h"
#include "agent/open_calls.h"
#include "agent/receive_memory.h"
#include "agent/unread_rrefs.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace torch_rpc_ext::agent {

// The calling side: sends a request and completes the future of its answer.
//
// Owns: the calls under way (OpenCalls), the way in which threads wait for
//   answers (AnswerWait).
// Thread: any.
// Outlives: the callbacks of what it has sent, once the transport is stopped.
class Caller {
 public:
  using WorkerInfo = torch::distributed::rpc::WorkerInfo;
  using Message = torch::distributed::rpc::Message;
  using JitFuture = torch::distributed::rpc::JitFuture;

  // The references outlive it.
  Caller(
      const AgentOptions& options,
      Executor& executor,
      metrics::Counters& counters,
      ReceiveMemory& memory,
      Group& group,
      Devices& devices,
      UnreadRRefs& unreadRRefs,
      const AgentHooks& hooks);

  // Sends a request and returns the future of its answer. Throws for a message
  // that cannot be sent, and what checkInterrupt() of the hooks throws while
  // this waits: for room (LoadLimits), or for the answer (AnswerWait).
  c10::intrusive_ptr<JitFuture> send(
      const WorkerInfo& to,
      const c10::intrusive_ptr<Message>& message,
      std::chrono::milliseconds timeout, // 0 for none
      const torch::distributed::rpc::DeviceMap& deviceMap);
  // Sends RREF_USER_DELETE. An owner that has left the group has nothing to
  // release: the future is completed. torch would log an error, and wait 10 s
  // for the answer when this worker leaves.
  c10::intrusive_ptr<JitFuture> release(
      const WorkerInfo& owner,
      const c10::intrusive_ptr<Message>& message,
      std::chrono::milliseconds timeout);
  // Sends a small message of this package (message_types.h). No limit and no
  // time-out applies to it, and shutdown does not wait for it. `label` names
  // the message in errors.
  c10::intrusive_ptr<JitFuture> ask(
      const WorkerInfo& to,
      const c10::intrusive_ptr<Message>& message,
      std::string label);
  // See AnswerWait::await().
  void await(const AnswerWait::Call& call, JitFuture& future) {
    wait_.await(call, future);
  }

  // Gives a call the future that the caller's code has (PendingCall::result).
  void setResult(uint64_t callId, c10::intrusive_ptr<JitFuture> result) {
    calls_.pending().setResult(callId, std::move(result));
  }

  // What the Receiver asks about an answer whose frame has arrived: whether
  // anybody waits for the answer; what this thread claims of the call; the
  // mailbox of the thread that waits, null if the pool is to process the
  // answer.
  bool expects(uint64_t callId) const {
    return calls_.pending().contains(callId);
  }
  Executor::Claims claims(uint64_t callId, bool plain) const {
    return wait_.claims(callId, plain);
  }
  std::shared_ptr<Mailbox> mailboxOf(uint64_t callId) const {
    return calls_.pending().mailboxOf(callId);
  }
  // An answer says whether its callee has read the request. To be called where
  // the request had RRefs, or where nobody waits for the answer any more.
  void hearWhetherRead(const wire::CallHeader& header) {
    calls_.answered(header.callId, header.messageType);
  }
  // All of an answer has arrived: completes the call, on the thread that waits
  // for it or on the pool.
  void answered(ArrivalPtr arrival);

  // A connection has ended: fails its calls.
  void lose(const transport::Connection* connection, const base::Error& error) {
    calls_.failAll(connection, error);
  }
  // Fails all calls, so that the threads that wait for them go on, and all
  // further calls.
  void failAll(const base::Error& error) {
    calls_.failAll(error);
  }
  // No call runs into its time-out any more.
  void stop() {
    calls_.pending().stop();
  }

  // Runs `hook` with the error if the call with this future fails, before the
  // future gets the error. False when the call is already ending.
  bool beforeFailure(
      const torch::distributed::rpc::JitFuture& future,
      std::function<void(std::exception_ptr)> hook) {
    // Usually this thread's last call; a handler of an operating system signal
    // may have made another one since.
    const uint64_t id = AnswerWait::lastCall().id;
    return calls_.pending().setBeforeFailure(future, id, std::move(hook));
  }
  // The number of calls that the shutdown of the group waits for.
  int64_t openCalls() const {
    return counters_.clientActiveCalls.load();
  }
  // See OpenCalls::waitUntilNone().
  int64_t waitUntilNone(std::chrono::milliseconds patience) {
    return calls_.waitUntilNone(patience);
  }
  metrics::CallLog& log() {
    return calls_.log();
  }
  void addTo(Metrics& metrics) const {
    calls_.addTo(metrics);
  }

 private:
  PendingCall newCall(
      const WorkerInfo& to,
      const Message& message,
      std::chrono::milliseconds timeout) const;
  // The map of the call itself goes before that of the options.
  device::Route routeTo(
      const WorkerInfo& to,
      const torch::distributed::rpc::DeviceMap& deviceMap) const;
  EncodeOptions encodeOptions(
      uint64_t callId,
      uint32_t timeout,
      const std::string& worker,
      const transport::ConnectionPtr& connection);
  base::Error sendFromDevices(
      const EncodeOptions& options,
      const c10::intrusive_ptr<Message>& message,
      const device::Route& route,
      const transport::ConnectionPtr& connection);
  void sendFrame(
      uint64_t callId,
      Encoded encoded,
      const transport::ConnectionPtr& connection);
  void sendFrameNow(
      uint64_t callId,
      Encoded encoded,
      const transport::ConnectionPtr& connection);
  void completeLater(ArrivalPtr arrival);
  void complete(const ArrivalPtr& arrival);
  // Releases the RRefs in the answer of a call whose thread has stopped to
  // wait, and whose future nobody else has.
  void releaseUnread(JitFuture& future);
  // An answer for which nobody waits any more.
  void tooLate(const ArrivalPtr& arrival);
  // Releases the RRefs in an answer that has been decoded, or could not be, and
  // that no code will read.
  void releaseUnread(Arrival& arrival);

  const AgentOptions& options_;
  Executor& executor_;
  metrics::Counters& counters_;
  ReceiveMemory& memory_;
  Group& group_;
  Devices& devices_;
  UnreadRRefs& unreadRRefs_;
  OpenCalls calls_;
  AnswerWait wait_; // after calls_, to which it refers
};

} // namespace torch_rpc_ext::agent
