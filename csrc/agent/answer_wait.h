#pragma once

#include "agent/executor.h"
#include "agent/pending_calls.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace torch_rpc_ext::agent {

// How a thread waits for the answer to the call that it has made itself: it
// serves the transport in place of the pool (Executor::Leader), or, when
// another thread does so or the call is large, takes the answer from that one
// (Mailbox).
//
// Owns: for each thread, which call is its last and how it waits for it.
// Thread: any; what it says of a call is about calls of the asking thread.
class AnswerWait {
 public:
  // Both outlive it.
  AnswerWait(Executor& executor, PendingCalls& pending)
      : executor_(executor), pending_(pending) {}

  // True: this thread waits at once for the answer to the call that it makes
  // next, so send() may do so, and then makes it false. Returns what it was.
  static bool setSynchronous(bool value);
  // The number of this thread's last call; 0 for none.
  static uint64_t lastCallId();

  // A call while this thread hands it to its connection.
  class Sending;
  // This thread is handing that call to its connection.
  static bool isBeingSent(uint64_t callId);
  // To be called right before that call leaves: makes its thread the leader, if
  // it waits for the answer.
  void leadFor(uint64_t callId);

  // A call of this thread begins. One to oneself is not waited for here.
  void begin(uint64_t callId, bool toSelf);
  // Whether the sender of `request` waits at once for the answer.
  static bool isAwaited(const torch::distributed::rpc::Message& request);
  // Waits for the answer to the call that has just been sent: until it is
  // there, or a signal of the system comes, or a second has passed; then the
  // wait goes on in await(). `leader` is that of Sending.
  void afterSending(
      uint64_t callId,
      std::optional<Executor::Leader>& leader,
      torch::distributed::rpc::JitFuture& future);
  // Waits for the answer to the last call of this thread, whose future is
  // `future`, in the way that is fastest; may return before it is there.
  // `interrupted` runs after a signal of the system, and each second, and may
  // throw.
  void await(
      torch::distributed::rpc::JitFuture& future,
      const std::function<void()>& interrupted);
  // This thread leads, and waits for the answer to that call.
  bool awaitedHere(uint64_t callId) const;

 private:
  // Two ways to wait for `future`, of the answer to a call of this thread: to
  // serve the transport oneself, and to let another thread do so and take the
  // answer from it. False after a signal of the system, and each second.
  // `signals`: the future tells leaders of its completion already.
  static bool lead(
      Executor::Leader& leader,
      torch::distributed::rpc::JitFuture& future,
      bool& signals);
  bool receive(uint64_t callId, torch::distributed::rpc::JitFuture& future);

  Executor& executor_;
  PendingCalls& pending_;
};

// Thread: the one that makes it.
class AnswerWait::Sending {
 public:
  // `waits`: this thread waits for the answer at once. With more than a few
  // megabytes it does not lead even so.
  Sending(
      uint64_t callId,
      uint64_t bytes,
      bool waits,
      std::optional<Executor::Leader>& leader);
  ~Sending();
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;

 private:
  const uint64_t idBefore_;
  std::optional<Executor::Leader>* const leaderBefore_;
};

} // namespace torch_rpc_ext::agent
