#pragma once

#include "agent/agent_options.h"
#include "agent/answer_wait.h"
#include "agent/arrival.h"
#include "agent/codec.h"
#include "agent/devices.h"
#include "agent/executor.h"
#include "agent/group.h"
#include "agent/lender.h"
#include "agent/open_calls.h"
#include "agent/receive_memory.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace torch_rpc_ext::agent {

// The calling side: from a message to the future of its answer.
//
// Owns: the calls under way (OpenCalls), and how threads wait for answers.
// Thread: any.
// Outlives: what it has sent, once stopped.
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
      ExceptionDecoder decodeException);

  // Returns the future of the answer. Throws for a message that cannot be sent.
  c10::intrusive_ptr<JitFuture> send(
      const WorkerInfo& to,
      const c10::intrusive_ptr<Message>& message,
      std::chrono::milliseconds timeout, // 0 for none
      const torch::distributed::rpc::DeviceMap& deviceMap);
  // Sends a message of our own, a few bytes, that no limit or time-out holds
  // for and that the end of the group does not wait for. `label` names it in
  // errors.
  c10::intrusive_ptr<JitFuture> ask(
      const WorkerInfo& to,
      const c10::intrusive_ptr<Message>& message,
      std::string label);
  // See AnswerWait.
  void await(JitFuture& future, const std::function<void()>& interrupted) {
    wait_.await(future, interrupted);
  }

  // What the Receiver has to know of an answer, before it is all here: whether
  // anybody waits for it, whether this very thread does, and to whom its work
  // is to be given; null for the pool.
  bool expects(uint64_t callId) const {
    return calls_.pending().contains(callId);
  }
  bool awaitedHere(uint64_t callId) const {
    return wait_.awaitedHere(callId);
  }
  std::shared_ptr<Mailbox> mailboxOf(uint64_t callId) const {
    return calls_.pending().mailboxOf(callId);
  }
  // All of an answer is here: completes the call on the thread that waits for
  // it, or on the pool.
  void answered(ArrivalPtr arrival);

  // A connection has ended: so have its calls.
  void lose(const transport::Connection* connection, const base::Error& error) {
    calls_.failAll(connection, error);
  }
  // Fails all calls and all further ones: who waits must be able to end.
  void failAll(const base::Error& error) {
    calls_.failAll(error);
  }
  // No deadline is looked after any more.
  void stop() {
    calls_.stop();
  }

  // Has `hook` run if that call fails, before anybody hears of it. False when
  // it is ending already.
  bool beforeFailure(uint64_t callId, std::function<void()> hook) {
    return calls_.pending().setBeforeFailure(callId, std::move(hook));
  }
  size_t pendingCalls() const {
    return calls_.pending().size();
  }
  size_t pendingDeadlines() const {
    return calls_.pending().withDeadline();
  }
  // Those that the end of the group waits for.
  int64_t openCalls() const {
    return counters_.clientActiveCalls.load();
  }
  // Waits until there is none, for `patience` at most. Returns how many there
  // are.
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

  const AgentOptions& options_;
  Executor& executor_;
  metrics::Counters& counters_;
  ReceiveMemory& memory_;
  Group& group_;
  Devices& devices_;
  Lender lender_;
  OpenCalls calls_;
  AnswerWait wait_; // after the calls
};

} // namespace torch_rpc_ext::agent
