#pragma once

#include "agent/executor.h"
#include "agent/pending_calls.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace torch_rpc_ext::agent {

// How a thread waits for the answer to its own call: it serves the transport in
// place of the pool (Executor::Leader). When another thread already does so, or
// the call is large, the thread instead sleeps until the answer is put into its
// Mailbox.
//
// Owns: nothing; a thread's last call, and the call whose answer the thread
//   waits for, are thread_local.
// Thread: any; each method speaks of the calls of the thread that calls it.
class AnswerWait {
 public:
  // Both references outlive the AnswerWait. `checkInterrupt` is called during
  // each wait, after an operating system signal and once a second, and ends the
  // wait by throwing; the call goes on.
  AnswerWait(
      Executor& executor,
      PendingCalls& pending,
      std::function<void()> checkInterrupt)
      : executor_(executor),
        pending_(pending),
        checkInterrupt_(std::move(checkInterrupt)) {}

  // True says that this thread will wait for the answer to its next call as
  // soon as send() has returned, so send() waits. Returns the former value.
  static bool setSynchronous(bool value);
  // A call, for the thread that will wait for its answer.
  struct Call {
    const AnswerWait* wait = nullptr; // null: no call
    uint64_t id = 0; // 0: no call
    bool leads = true; // whether a thread may lead while it waits
  };
  // This thread's last call of a user's function. Not one of upstream's own
  // messages: the collector of garbage may send one at any time, for an RRef.
  static Call lastCall();

  // Lives while this thread hands a call to its connection.
  class Sending;
  // Whether this thread is handing that call to its connection.
  static bool isBeingSent(uint64_t callId);
  // To be called right before that call leaves: makes this thread the leader if
  // the thread will wait for the answer.
  void leadFor(uint64_t callId);

  // A call of a user's function begins on this thread.
  void begin(uint64_t callId);
  // Whether the thread that sends `request` waits at once for the answer.
  static bool isAwaited(const torch::distributed::rpc::Message& request);
  // Waits for the answer to the call that has just been sent, whose `future`
  // only this thread has. `leader` is the one that was given to Sending.
  void afterSending(
      uint64_t callId,
      std::optional<Executor::Leader>& leader,
      torch::distributed::rpc::JitFuture& future);
  // Waits for the answer to `call`, until `future` is completed. Others may
  // have the future, too.
  void await(const Call& call, torch::distributed::rpc::JitFuture& future);
  // Whether this thread, which leads, is to complete the call whose answer has
  // arrived. kLast: the thread waits for this call, and nobody else has given
  // the future a callback. kFirst: the thread waits for another future, the
  // answer is `plain` (Arrival::isPlainAnswer()), and nobody waits for the
  // call. The thread's own answer comes last, because user code may run when
  // that answer is read, and may wait.
  Executor::Claims claims(uint64_t callId, bool plain) const;

 private:
  // Who has the future of a call.
  enum class Sharing : uint8_t {
    kPrivate, // only the thread that waits
    // Others have given the future callbacks, or may do so. A callback may wait
    // for what this thread does after its wait, so it must not run here.
    kShared
  };

  // If the thread may lead, `leads`, it does so by `leader`, which may have
  // begun to lead already.
  void waitFor(
      uint64_t callId,
      torch::distributed::rpc::JitFuture& future,
      Sharing sharing,
      bool leads,
      std::optional<Executor::Leader>& leader);
  // The two ways to wait for `future`: lead() serves the transport on this
  // thread; receive() sleeps until another thread, which serves the transport,
  // puts the answer into this thread's mailbox or, if the future is shared, has
  // completed it. Both return false after an operating system signal, and after
  // a second.
  static bool lead(
      Executor::Leader& leader,
      torch::distributed::rpc::JitFuture& future);
  bool receive(
      uint64_t callId,
      torch::distributed::rpc::JitFuture& future,
      Sharing sharing);

  Executor& executor_;
  PendingCalls& pending_;
  const std::function<void()> checkInterrupt_;
};

// Thread: the one that constructs it.
class AnswerWait::Sending {
 public:
  // `waits`: this thread will wait for the answer at once, and so leads, unless
  // the call is to this worker itself or has more than a few megabytes.
  Sending(
      uint64_t callId,
      uint64_t bytes,
      bool toSelf,
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
