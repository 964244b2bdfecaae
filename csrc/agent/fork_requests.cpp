#include "agent/fork_requests.h"

#include "base/log.h"

#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <cmath>
#include <exception>
#include <utility>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

namespace {

// The number of further attempts and the pauses before them are torch's
// (RpcRetryOptions): 1 s, 1.5 s, 2.25 s and so on, 13 s in all.
const rpc::RpcRetryOptions kRetries;

void confirm(rpc::JitFuture& future) {
  future.markCompleted(c10::IValue(rpc::RRefAck().toMessage()));
}

} // namespace

ForkRequests::ForkRequests(Executor& executor, Group& group, Caller& caller)
    : executor_(executor),
      group_(group),
      caller_(caller),
      timer_(executor.poller(), [this] { onTimer(); }) {}

c10::intrusive_ptr<rpc::JitFuture> ForkRequests::send(
    const WorkerInfo& owner,
    const c10::intrusive_ptr<Message>& message,
    std::chrono::milliseconds timeout) {
  auto future = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
  attempt(std::make_shared<Request>(Request{owner, message, timeout, future}));
  return future;
}

bool ForkRequests::ownerIsGone(const Request& request) const {
  const auto owner = request.owner.id_;
  return group_.ownerDied(*request.message, owner) ||
      group_.peers().isGone(owner);
}

void ForkRequests::attempt(const RequestPtr& request) {
  if (ownerIsGone(*request)) {
    confirm(*request->future);
    return;
  }
  c10::intrusive_ptr<JitFuture> answer;
  try {
    answer =
        caller_.send(request->owner, request->message, request->timeout, {});
  } catch (const std::exception&) {
    failed(request);
    return;
  }
  answer->addCallback([this, request](JitFuture& done) {
    if (done.hasError()) {
      failed(request);
    } else {
      confirm(*request->future);
    }
  });
}

void ForkRequests::failed(const RequestPtr& request) {
  if (ownerIsGone(*request)) {
    confirm(*request->future);
    return;
  }
  if (request->failures == kRetries.maxRetries) {
    base::log(
        base::LogLevel::kWarning,
        "could not tell worker \"" + request->owner.name_ +
            "\" that this worker uses one of its RRefs, too: that worker may "
            "release the value of the RRef");
    confirm(*request->future);
    return;
  }
  const auto pause = std::chrono::duration_cast<Clock::duration>(
      kRetries.rpcRetryDuration *
      std::pow(kRetries.retryBackoff, request->failures));
  ++request->failures;
  auto state = state_.lock();
  if (!state->stopped) {
    state->waiting.emplace(Clock::now() + pause, request);
    timer_.set(state->waiting.begin()->first);
  }
}

void ForkRequests::onTimer() {
  auto state = state_.lock();
  auto& waiting = state->waiting;
  while (!waiting.empty() && waiting.begin()->first <= Clock::now()) {
    // A completion, because the function that waits for the owner begins there.
    executor_.submitCompletion(
        base::makeTask(
            [this, request = waiting.begin()->second] { attempt(request); }));
    waiting.erase(waiting.begin());
  }
  if (!waiting.empty()) {
    timer_.set(waiting.begin()->first);
  }
}

void ForkRequests::stop() {
  auto state = state_.lock();
  state->stopped = true;
  state->waiting.clear();
  timer_.stop();
}

} // namespace torch_rpc_ext::agent
