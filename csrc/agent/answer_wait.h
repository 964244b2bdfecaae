#pragma once

#include "agent/executor.h"
#include "agent/pending_calls.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace torch_rpc_ext::agent {

// How a thread waits for the answer to its own call: it serves the transport in
// place of the pool (Executor::Leader). When another thread already does so, or
// the call is large, the thread instead sleeps until the answer is put into its
// Mailbox.
//
// Owns: nothing; which call is a thread's last, and how the thread waits for
//   its answer, are thread_local.
// Thread: any; each method speaks of the calls of the thread that calls it.
class AnswerWait {
 public:
  // Both references outlive the AnswerWait.
  AnswerWait(Executor& executor, PendingCalls& pending)
      : executor_(executor), pending_(pending) {}

  // True says that this thread will wait for the answer to its next call as
  // soon as send() has returned, so send() may already wait. If the answer
  // comes while send() waits, send() sets the value to false. Returns the
  // former value.
  static bool setSynchronous(bool value);
  // The id of this thread's last call; 0 where there is none.
  static uint64_t lastCallId();

  // Lives while this thread hands a call to its connection.
  class Sending;
  // Whether this thread is handing that call to its connection.
  static bool isBeingSent(uint64_t callId);
  // To be called right before that call leaves: makes this thread the leader if
  // the thread will wait for the answer.
  void leadFor(uint64_t callId);

  // A call of this thread begins. await() does nothing for a call `toSelf`.
  void begin(uint64_t callId, bool toSelf);
  // Whether the thread that sends `request` waits at once for the answer.
  static bool isAwaited(const torch::distributed::rpc::Message& request);
  // Waits for the answer to the call that has just been sent. Ends when the
  // answer is there, after an operating system signal, or after a second; in
  // the last two cases await() goes on. `leader` is the one that was given to
  // Sending.
  void afterSending(
      uint64_t callId,
      std::optional<Executor::Leader>& leader,
      torch::distributed::rpc::JitFuture& future);
  // Waits for the answer to this thread's last call, whose future is `future`.
  // May return before the answer is there, so the caller must then wait for
  // `future` itself. `interrupted` runs after an operating system signal, and
  // once a second, and may throw.
  void await(
      torch::distributed::rpc::JitFuture& future,
      const std::function<void()>& interrupted);
  // Whether this thread leads and waits for the answer to that call.
  bool awaitedHere(uint64_t callId) const;

 private:
  // The two ways to wait for `future`: lead() serves the transport on this
  // thread; receive() sleeps until another thread, which serves the transport,
  // puts the answer into this thread's mailbox. Both return false after an
  // operating system signal, and after a second. `signals`: whether `future`
  // already has the callback that wakes the leader.
  static bool lead(
      Executor::Leader& leader,
      torch::distributed::rpc::JitFuture& future,
      bool& signals);
  bool receive(uint64_t callId, torch::distributed::rpc::JitFuture& future);

  Executor& executor_;
  PendingCalls& pending_;
};

// Thread: the one that constructs it.
class AnswerWait::Sending {
 public:
  // `waits`: this thread will wait for the answer at once, and so leads, unless
  // the call has more than a few megabytes.
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
