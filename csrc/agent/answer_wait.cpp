// How a thread waits for the answer to its own call.

#include "agent/answer_wait.h"

#include "agent/mailbox.h"
#include "agent/wrapped_message.h"
#include "compat/torch_compat.h"

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

namespace {

// The call that this thread is handing to its connection.
struct BeingSent {
  uint64_t id = 0; // 0: no call
  // leadFor() fills it; null if this thread will not lead.
  std::optional<Executor::Leader>* leader = nullptr;
};
thread_local BeingSent beingSent;

// A call of more bytes takes milliseconds. Its thread does not lead meanwhile:
// leading is worth more to a small call of another thread.
constexpr uint64_t kMaxLedBytes = uint64_t{8} << 20;
// Also while answers to other calls end each wait, waitFor() calls
// `checkInterrupt` this often.
constexpr std::chrono::seconds kLookEvery{1};

thread_local AnswerWait::Call last;

// The call for whose answer this thread waits.
struct Awaited {
  const AnswerWait* wait = nullptr; // null: none
  uint64_t id = 0;
  rpc::JitFuture* shared = nullptr; // the future, if others have it too
  // What the wait has given to the future: each callback once, however many
  // rounds the wait takes.
  bool signals = false; // whether a callback wakes the leader
  std::shared_ptr<Mailbox> mailbox = nullptr; // null: no callback rings one

  size_t callbacks() const {
    return size_t{signals} + (mailbox == nullptr ? 0 : 1);
  }
};
thread_local Awaited awaited;

class Awaiting {
 public:
  explicit Awaiting(Awaited now)
      : before_(std::exchange(awaited, std::move(now))) {}
  ~Awaiting() {
    awaited = std::move(before_);
  }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;

 private:
  Awaited before_;
};

// See setSynchronous().
thread_local bool synchronous = false;

} // namespace

AnswerWait::Sending::Sending(
    uint64_t callId,
    uint64_t bytes,
    bool toSelf,
    bool waits,
    std::optional<Executor::Leader>& leader)
    : idBefore_(beingSent.id), leaderBefore_(beingSent.leader) {
  const bool leads = !toSelf && bytes <= kMaxLedBytes;
  if (last.id == callId) {
    last.leads = leads;
  }
  beingSent = {callId, waits && leads ? &leader : nullptr};
}

AnswerWait::Sending::~Sending() {
  beingSent = {idBefore_, leaderBefore_};
}

bool AnswerWait::isBeingSent(uint64_t callId) {
  return beingSent.id == callId;
}

void AnswerWait::leadFor(uint64_t callId) {
  if (beingSent.id == callId && beingSent.leader != nullptr) {
    beingSent.leader->emplace(executor_);
  }
}

void AnswerWait::begin(uint64_t callId) {
  last = {this, callId};
}

bool AnswerWait::isAwaited(const rpc::Message& request) {
  switch (innermost(request).type) {
    case rpc::MessageType::SCRIPT_RREF_FETCH_CALL:
    case rpc::MessageType::PYTHON_RREF_FETCH_CALL:
      return true; // UserRRef::toHere()
    case rpc::MessageType::SCRIPT_CALL:
    case rpc::MessageType::PYTHON_CALL:
      return synchronous;
    default:
      return false;
  }
}

void AnswerWait::afterSending(
    uint64_t callId,
    std::optional<Executor::Leader>& leader,
    rpc::JitFuture& future) {
  synchronous = false; // while this thread waits, it may run other code
  const Awaiting awaiting({.wait = this, .id = callId});
  const bool leads = leader.has_value();
  waitFor(callId, future, Sharing::kPrivate, leads, leader);
}

bool AnswerWait::setSynchronous(bool value) {
  return std::exchange(synchronous, value);
}

AnswerWait::Call AnswerWait::lastCall() {
  return last;
}

void AnswerWait::await(const Call& call, rpc::JitFuture& future) {
  if (call.wait != this) {
    return; // the future is of no call
  }
  const Awaiting awaiting({.wait = this, .id = call.id, .shared = &future});
  std::optional<Executor::Leader> leader;
  waitFor(call.id, future, Sharing::kShared, call.leads, leader);
}

void AnswerWait::waitFor(
    uint64_t callId,
    rpc::JitFuture& future,
    Sharing sharing,
    bool leads,
    std::optional<Executor::Leader>& leader) {
  using Clock = std::chrono::steady_clock;
  auto looked = Clock::now();
  while (!future.completed()) {
    if (leads && !leader) {
      leader.emplace(executor_);
    }
    const bool whole = leader && leader->leads()
        ? lead(*leader, future)
        : receive(callId, future, sharing);
    leader.reset(); // checkInterrupt_() may take long
    // Answers to other calls may end each wait before the wait notices a
    // signal.
    if (!whole || Clock::now() - looked > kLookEvery) {
      checkInterrupt_();
      looked = Clock::now();
    }
  }
}

bool AnswerWait::lead(Executor::Leader& leader, rpc::JitFuture& future) {
  if (!std::exchange(awaited.signals, true)) {
    // First, because another callback may take long.
    compat::addFirstCallback(
        future,
        [signal = leader.signal(),
         waiter = std::this_thread::get_id()](rpc::JitFuture&) {
          if (std::this_thread::get_id() != waiter) {
            signal->raise();
          }
        });
  }
  return leader.wait([&] { return future.completed(); });
}

bool AnswerWait::receive(
    uint64_t callId,
    rpc::JitFuture& future,
    Sharing sharing) {
  // A copy: a task of the mailbox may wait for another answer.
  auto mailbox = awaited.mailbox;
  if (mailbox == nullptr) {
    mailbox = awaited.mailbox = std::make_shared<Mailbox>();
    compat::addFirstCallback(
        future,
        [mailbox, waiter = std::this_thread::get_id()](rpc::JitFuture&) {
          if (std::this_thread::get_id() != waiter) {
            mailbox->ring();
          }
        });
  }
  mailbox->open();
  if (sharing == Sharing::kPrivate) {
    pending_.setMailbox(callId, mailbox);
  }
  const bool whole = mailbox->serve([&] { return future.completed(); });
  for (auto& task : mailbox->close()) {
    executor_.submitCompletion(std::move(task));
  }
  return whole;
}

Executor::Claims AnswerWait::claims(uint64_t callId, bool plain) const {
  using Claims = Executor::Claims;
  if (!executor_.leads() || awaited.wait != this) {
    return Claims::kNothing;
  }
  if (awaited.id == callId) {
    return awaited.shared == nullptr ||
            compat::callbacks(*awaited.shared) <= awaited.callbacks()
        ? Claims::kLast
        : Claims::kNothing;
  }
  if (awaited.shared == nullptr || !plain) {
    return Claims::kNothing;
  }
  // To wake another thread would take longer than to complete the call.
  const auto result = pending_.resultOf(callId);
  return result != nullptr && compat::callbacks(*result) == 0
      ? Claims::kFirst
      : Claims::kNothing;
}

} // namespace torch_rpc_ext::agent
