#pragma once

#include "agent/executor.h"
#include "agent/mailbox.h"
#include "base/error.h"
#include "base/synchronized.h"
#include "base/timer.h"
#include "transport/transport.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

// Bytes of a request that the callee has not taken yet; 0 once it has.
using UntakenPtr = std::shared_ptr<std::atomic<uint64_t>>;

// A request that waits for its response.
struct PendingCall {
  using Clock = std::chrono::steady_clock;

  uint64_t id = 0; // given by PendingCalls
  c10::intrusive_ptr<torch::distributed::rpc::JitFuture> future;
  transport::ConnectionPtr connection;
  UntakenPtr untaken; // null: nothing waits to be taken
  std::string worker; // name of the callee
  std::string label; // what the call asks for (call_label.h)
  std::chrono::milliseconds timeout{0}; // 0: none
  Clock::time_point sentAt;
  // Of the request whose function made the call; else null.
  Executor::RequestScopePtr scope;
  std::shared_ptr<Mailbox> mailbox; // of the thread that waits; or null
  // What the caller's code has of the call: a future of the result, which
  // `future` completes. Null if that code cannot reach it yet.
  c10::intrusive_ptr<torch::distributed::rpc::JitFuture> result;
  std::function<void(std::exception_ptr)> beforeFailure; // see Caller
  // payloadWithRRefs() of the request, until the request is sent. Null for
  // nearly all calls. A pointer and not a std::string, because a call is moved
  // several times, and a null pointer is cheaper to move.
  std::unique_ptr<std::string> rrefs;
  // The request holds RRefs: UnreadRRefs has to hear whether it was read.
  bool holdsRRefs = false;
  bool counted = true; // whether shutdown waits for the call
  bool createsRRef = false;
  // Whether the call counts in LoadLimits, as one call to `to` with `bytes`.
  bool limited = false;
  torch::distributed::rpc::worker_id_t to = -1;
  uint64_t bytes = 0;

  // max(): none.
  Clock::time_point deadline() const {
    return timeout.count() > 0 ? sentAt + timeout : Clock::time_point::max();
  }
};

// In ns, on the clock of Python's time.perf_counter_ns().
inline int64_t toNanoseconds(PendingCall::Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             time.time_since_epoch())
      .count();
}

// The calls of this worker that wait for their answers, and their deadlines.
//
// Owns: the calls until take() or expiry, and a timer.
// Thread: any.
// Outlives: nothing; stop() detaches it from the Poller.
class PendingCalls {
 public:
  using Expired = std::function<void(PendingCall)>;

  // Connection::probe() is called when the connection's oldest call has waited
  // for `patience`, then each time that this wait has doubled, and from a
  // minute on once a minute.
  PendingCalls(
      base::Poller& poller,
      std::chrono::milliseconds patience,
      Expired expired);
  ~PendingCalls();
  PendingCalls(const PendingCalls&) = delete;
  PendingCalls& operator=(const PendingCalls&) = delete;

  // Gives the call its id. After close(), returns the error of close() and
  // leaves the call as it is.
  base::Error add(PendingCall& call);
  // Says on which connection the call is about to be sent: the call fails when
  // that connection ends. Moves the call's RRefs into `rrefs`: they no longer
  // end with the call. False for a call that is no longer here: if it holds
  // RRefs, it must not be sent, because they have been released.
  [[nodiscard]] bool setSent(
      uint64_t id,
      const transport::ConnectionPtr& connection,
      UntakenPtr untaken,
      std::unique_ptr<std::string>& rrefs);
  // Gives the call the mailbox of the thread that waits for the answer.
  void setMailbox(uint64_t id, std::shared_ptr<Mailbox> mailbox);
  // See PendingCall::result.
  void setResult(
      uint64_t id,
      c10::intrusive_ptr<torch::distributed::rpc::JitFuture> result);
  c10::intrusive_ptr<torch::distributed::rpc::JitFuture> resultOf(
      uint64_t id) const;
  // For the call with this future, probably the call `id`. False for a call
  // that is no longer here.
  bool setBeforeFailure(
      const torch::distributed::rpc::JitFuture& future,
      uint64_t id,
      std::function<void(std::exception_ptr)> hook);
  // Null where no thread waits with a mailbox, and for a call that is no longer
  // here.
  std::shared_ptr<Mailbox> mailboxOf(uint64_t id) const;

  // Each call is given away exactly once: by take(), by takeAll(), or to
  // `expired`.
  std::optional<PendingCall> take(uint64_t id);
  // The calls that were sent over `connection`.
  std::vector<PendingCall> takeAll(const transport::Connection* connection);
  // All calls. No call is added from here on.
  std::vector<PendingCall> close(const base::Error& why);
  bool contains(uint64_t id) const;
  size_t size() const;

  // No call expires any more.
  void stop();

 private:
  using Clock = PendingCall::Clock;
  using Calls = std::unordered_map<uint64_t, PendingCall>;
  struct State {
    uint64_t nextId = 1;
    Calls calls;
    std::set<std::pair<Clock::time_point, uint64_t>> deadlines;
    // When the timer fires; max() when it does not.
    Clock::time_point armed = Clock::time_point::max();
    // When onProbing() ran last, or probing_ was set first; max() while
    // probing_ is not set.
    Clock::time_point probed = Clock::time_point::max();
    base::Error closed; // the error of close()
    bool stopped = false;
  };

  void onTimer();
  void arm(State& state);
  void armProbing(State& state, Clock::time_point now);
  void onProbing();
  // Whether one of the moments at which the call's connection is to probe lies
  // after `after`, and not after `until`.
  bool isToProbe(
      const PendingCall& call,
      Clock::time_point after,
      Clock::time_point until) const;
  static PendingCall extract(State& state, Calls::iterator it);

  const Clock::duration patience_;
  const Expired expired_;
  base::Synchronized<State> state_;
  // Last: their handlers use the others.
  base::Timer timer_;
  base::Timer probing_;
};

} // namespace torch_rpc_ext::agent
