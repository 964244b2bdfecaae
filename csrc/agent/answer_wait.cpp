// How a thread waits for the answer to its own call.

#include "agent/answer_wait.h"

#include "agent/mailbox.h"

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

// This thread's last call.
struct LastCall {
  const AnswerWait* wait = nullptr; // null for a call to oneself
  uint64_t id = 0;
  bool leads = true; // whether this thread may lead while it waits
};
thread_local LastCall lastCall;
// See setSynchronous().
thread_local bool synchronous = false;

} // namespace

AnswerWait::Sending::Sending(
    uint64_t callId,
    uint64_t bytes,
    bool waits,
    std::optional<Executor::Leader>& leader)
    : idBefore_(beingSent.id), leaderBefore_(beingSent.leader) {
  lastCall.leads = bytes <= kMaxLedBytes;
  beingSent = {callId, waits && lastCall.leads ? &leader : nullptr};
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

void AnswerWait::begin(uint64_t callId, bool toSelf) {
  lastCall = {toSelf ? nullptr : this, callId};
}

bool AnswerWait::isAwaited(const rpc::Message& request) {
  switch (request.type()) {
    case rpc::MessageType::SCRIPT_RREF_FETCH_CALL:
    case rpc::MessageType::PYTHON_RREF_FETCH_CALL:
      return true; // UserRRef::toHere()
    case rpc::MessageType::SCRIPT_CALL:
    case rpc::MessageType::PYTHON_CALL:
    case rpc::MessageType::FORWARD_AUTOGRAD_REQ:
    case rpc::MessageType::RUN_WITH_PROFILING_REQ:
      return synchronous;
    default:
      return false;
  }
}

void AnswerWait::afterSending(
    uint64_t callId,
    std::optional<Executor::Leader>& leader,
    rpc::JitFuture& future) {
  if (leader && leader->leads()) {
    bool signals = false;
    lead(*leader, future, signals);
  } else {
    receive(callId, future);
  }
  synchronous = synchronous && !future.completed();
}

bool AnswerWait::setSynchronous(bool value) {
  return std::exchange(synchronous, value);
}

uint64_t AnswerWait::lastCallId() {
  return lastCall.id;
}

void AnswerWait::await(
    rpc::JitFuture& future,
    const std::function<void()>& interrupted) {
  bool signals = false;
  while (lastCall.wait == this && !future.completed()) {
    std::optional<Executor::Leader> leader;
    if (lastCall.leads) {
      leader.emplace(executor_);
    }
    if (leader && leader->leads() ? lead(*leader, future, signals)
                                  : receive(lastCall.id, future)) {
      return;
    }
    leader.reset(); // `interrupted` may take long
    interrupted();
  }
}

bool AnswerWait::lead(
    Executor::Leader& leader,
    rpc::JitFuture& future,
    bool& signals) {
  if (!std::exchange(signals, true)) {
    future.addCallback(
        [signal = leader.signal(),
         waiter = std::this_thread::get_id()](rpc::JitFuture&) {
          if (std::this_thread::get_id() != waiter) {
            signal->raise();
          }
        },
        /*uses_future=*/false);
  }
  return leader.wait([&] { return future.completed(); });
}

bool AnswerWait::receive(uint64_t callId, rpc::JitFuture& future) {
  const auto mailbox = std::make_shared<Mailbox>();
  pending_.setMailbox(callId, mailbox);
  future.addCallback(
      [mailbox, waiter = std::this_thread::get_id()](rpc::JitFuture&) {
        if (std::this_thread::get_id() != waiter) {
          mailbox->ring();
        }
      },
      /*uses_future=*/false);
  const bool whole = mailbox->serve([&] { return future.completed(); });
  for (auto& task : mailbox->close()) {
    executor_.submitCompletion(std::move(task));
  }
  return whole;
}

bool AnswerWait::awaitedHere(uint64_t callId) const {
  return executor_.leads() && lastCall.wait == this && lastCall.id == callId;
}

} // namespace torch_rpc_ext::agent
