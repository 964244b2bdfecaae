// Calls under way, and how each ends.

#include "agent/open_calls.h"

#include "agent/call_label.h"
#include "agent/creation_failure.h"
#include "agent/failure_message.h"
#include "agent/rpc_error.h"
#include "base/boundary.h"
#include "base/log.h"

#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

namespace {

// See creation_failure.h.
thread_local std::exception_ptr creationFailed;

// Upstream's callback for the creation of an RRef releases the RRef only if the
// error is a time-out; for any other error it throws, and the RRef waits for
// ever.
rpc::RPCErrorType typeOf(const PendingCall& call, base::ErrorKind kind) {
  return kind == base::ErrorKind::kTimedOut || call.createsRRef
      ? rpc::RPCErrorType::TIMEOUT
      : rpc::RPCErrorType::UNKNOWN_ERROR;
}

// The storages that a future with these devices has to record. It refuses
// storages of the meta device, on which no work is queued.
std::vector<rpc::JitFuture::WeakStorage> storagesOf(
    const rpc::Message& message,
    const std::vector<c10::Device>& devices) {
  if (devices.empty()) {
    return {};
  }
  auto storages = message.getStorages();
  std::erase_if(storages, [](const auto& weak) {
    const auto storage = weak.lock();
    return storage && storage->device().is_meta();
  });
  return storages;
}

// What the text of a time-out says about bulk that the callee has not yet taken
// from this worker.
std::string whyUntaken(const PendingCall& call) {
  const uint64_t bytes = call.untaken == nullptr ? 0 : call.untaken->load();
  return bytes == 0 ? ""
                    : ", and has not taken the " + std::to_string(bytes) +
          " bytes of the call yet: it takes no more than its receive_budget "
          "before it serves what it has";
}

bool isLate(const PendingCall& call) {
  return PendingCall::Clock::now() >= call.deadline();
}

// Runs `complete`, and logs an exception that a callback of the future throws.
template <typename F>
void logWhatIsThrown(const PendingCall& call, F&& complete) {
  const auto log = [&call](const std::string& text) {
    base::log(
        base::LogLevel::kInfo,
        "a callback of " + call.label + " on worker \"" + call.worker +
            "\" raised: " + text);
  };
  try {
    complete();
  } catch (const c10::Error& error) {
    log(error.what_without_backtrace());
  } catch (const std::exception& error) {
    log(error.what());
  }
}

// Completes a future, which runs its callbacks. Some callbacks of upstream
// throw when the call has failed, which would end the process.
template <typename F>
void settle(const PendingCall& call, F&& complete) {
  base::guarded(
      base::Boundary::kFuture,
      [&] { logWhatIsThrown(call, complete); },
      [&](const base::Error& error) {
        call.future->setErrorIfNeeded(
            std::make_exception_ptr(
                RpcError(error.kind, call.worker, error.message)));
      });
}

} // namespace

std::exception_ptr creationFailure() {
  return creationFailed;
}

void forgetCreationFailure() {
  creationFailed = nullptr;
}

OpenCalls::OpenCalls(
    const AgentOptions& options,
    Executor& executor,
    metrics::Counters& counters,
    const Peers& peers,
    UnreadRRefs& unreadRRefs,
    const AgentHooks& hooks)
    : executor_(executor),
      counters_(counters),
      peers_(peers),
      unreadRRefs_(unreadRRefs),
      decodeException_(hooks.decodeException),
      checkInterrupt_(hooks.checkInterrupt),
      load_(options.maxCallsInFlight, options.maxBytesInFlight),
      pending_(
          executor.poller(),
          toMilliseconds(options.transport.keepaliveSeconds),
          [this](PendingCall call) {
            metrics::add(counters_.callsTimedOut, 1);
            failLater(
                std::move(call), {base::ErrorKind::kTimedOut, std::string()});
          }) {}

void OpenCalls::begin(PendingCall& call) {
  call.scope = executor_.currentRequest();
  if (call.scope) {
    executor_.beginNested(call.scope);
  }
  counters_.clientActiveCalls.fetch_add(1);
  metrics::add(counters_.callsSent, 1);
}

base::Error OpenCalls::limit(PendingCall& call, const rpc::Message& message) {
  if (!isUserCall(message.type()) || endsAnother(call.label)) {
    return load_.stopped(); // unlimited: other calls may wait for this one
  }
  if (load_.countsBytes()) {
    call.bytes = bytesOf(message);
  }
  // Not max(): before glibc 2.30, a wait until then is over at once.
  const auto last = call.sentAt + toMilliseconds(kLongestSeconds);
  try {
    base::Error error = load_.begin(
        call.to, call.bytes, std::min(call.deadline(), last), checkInterrupt_);
    call.limited = !error;
    return error;
  } catch (const std::exception&) {
    drop(call);
    throw;
  }
}

void OpenCalls::withdraw(uint64_t callId) {
  if (auto call = pending_.take(callId)) {
    unreadRRefs_.judged(callId, Read::kNo);
    drop(*call);
  }
}

void OpenCalls::drop(PendingCall& call) {
  unreadRRefs_.undelivered(std::move(call.rrefs));
  ended(call);
}

bool OpenCalls::setSent(
    uint64_t callId,
    const transport::ConnectionPtr& connection,
    UntakenPtr untaken) {
  std::unique_ptr<std::string> rrefs;
  const bool here =
      pending_.setSent(callId, connection, std::move(untaken), rrefs);
  if (rrefs != nullptr) {
    unreadRRefs_.sent(callId, connection.get(), std::move(rrefs));
  }
  return here;
}

void OpenCalls::sendEnded(
    uint64_t callId,
    const std::weak_ptr<transport::Connection>& connection,
    const base::Error& error) {
  const auto open = connection.lock();
  if (meansUnread(error, open != nullptr && !open->closed())) {
    unreadRRefs_.judged(callId, Read::kNo);
  } else {
    // The peer says whether it has read the request, or its connection ends.
    unreadRRefs_.sendEnded(callId);
  }
}

void OpenCalls::answered(uint64_t callId, int type) {
  const auto failure = failureIn(type);
  unreadRRefs_.judged(callId, failure ? failure->read : Read::kYes);
}

void OpenCalls::makeRoom(PendingCall& call) {
  if (std::exchange(call.limited, false)) {
    load_.end(call.to, call.bytes);
  }
}

void OpenCalls::ended(PendingCall& call) {
  makeRoom(call);
  if (call.scope) {
    executor_.endNested(call.scope);
  }
  if (call.counted) {
    auto count = ended_.lock();
    ++*count;
    counters_.clientActiveCalls.fetch_sub(1);
    endedChanged_.notify_all();
  }
  call.future = nullptr; // nothing can end the call a second time
}

void OpenCalls::finish(
    PendingCall& call,
    c10::intrusive_ptr<rpc::Message> message) {
  std::exception_ptr raised;
  try {
    raised = decodeException_ ? decodeException_(*message) : nullptr;
  } catch (const std::exception&) {
    failed(call, std::current_exception());
    ended(call);
    return;
  }
  const auto failure = failureIn(message->type());
  if (failure || message->type() == rpc::MessageType::EXCEPTION) {
    std::string text(message->payload().begin(), message->payload().end());
    if (failure && failure->kind == base::ErrorKind::kCorrupted) {
      fail(std::move(call), {failure->kind, text});
      return;
    }
    if (call.createsRRef) {
      text = rpc::makeRPCError(text, rpc::RPCErrorType::TIMEOUT);
    }
    raised = failure
        ? std::make_exception_ptr(RpcError(failure->kind, call.worker, text))
        : std::make_exception_ptr(std::runtime_error(text));
  }
  if (raised != nullptr && isLate(call)) {
    // The callee gives a call up when its caller does, and its answer may come
    // before the timer here has run.
    metrics::add(counters_.callsTimedOut, 1);
    fail(std::move(call), {base::ErrorKind::kTimedOut, std::string()});
    return;
  }
  if (raised != nullptr) {
    failed(call, std::move(raised));
  } else {
    counters_.latency.add(PendingCall::Clock::now() - call.sentAt);
    note(call, /*failed=*/false);
    auto storages = storagesOf(*message, call.future->devices());
    makeRoom(call);
    settle(call, [&] {
      call.future->markCompleted(
          c10::IValue(std::move(message)), std::move(storages));
    });
  }
  ended(call);
}

void OpenCalls::failed(PendingCall& call, std::exception_ptr why) {
  metrics::add(counters_.callsFailed, 1);
  // Whatever these throw, the future has to be told.
  base::caughtHere(base::Boundary::kFuture, [&] {
    note(call, /*failed=*/true);
    if (call.beforeFailure) {
      call.beforeFailure(why);
    }
  });
  makeRoom(call);
  settle(call, [&] { call.future->setError(std::move(why)); });
}

void OpenCalls::fail(PendingCall call, const base::Error& error) {
  const std::string what = call.label + " on worker \"" + call.worker + "\"";
  std::string text;
  if (error.kind == base::ErrorKind::kTimedOut) {
    text = rpc::makeRPCError(
        c10::str(
            "RPC ran for more than set timeout (",
            call.timeout.count(),
            " ms) and will now be marked with an error: ",
            what,
            " has not answered",
            whyUntaken(call)),
        typeOf(call, error.kind));
  } else if (error.message.starts_with("RPCErr:")) {
    text = error.message; // fault injection: already in upstream's form
  } else {
    std::string why = error.message;
    if (error.kind == base::ErrorKind::kPeerLost) {
      const std::string before = peers_.whyLost(call.worker);
      if (!before.empty() && before != why) {
        why = before + ", and has not come back (" + why + ")";
      }
    }
    text = rpc::makeRPCError(
        what + " failed (" + base::toString(error.kind) + "): " + why,
        typeOf(call, error.kind));
  }
  const auto why =
      std::make_exception_ptr(RpcError(error.kind, call.worker, text));
  if (call.createsRRef) {
    creationFailed = why;
  }
  unreadRRefs_.undelivered(std::move(call.rrefs)); // null once it is sent
  failed(call, why);
  ended(call);
}

void OpenCalls::failLater(PendingCall call, const base::Error& error) {
  std::shared_ptr<PendingCall> held; // shared by the task and the handler below
  base::guarded(
      base::Boundary::kCompletion,
      [&] {
        held = std::make_shared<PendingCall>(std::move(call));
        executor_.submitCompletion(base::makeTask([this, held, error] {
          fail(std::move(*held), error);
        }));
      },
      [&](const base::Error&) {
        fail(std::move(held == nullptr ? call : *held), error);
      });
}

void OpenCalls::failAll(
    const transport::Connection* connection,
    const base::Error& error) {
  unreadRRefs_.ended(connection, transport::isGone(connection->peer()));
  for (auto& call : pending_.takeAll(connection)) {
    failLater(std::move(call), error);
  }
}

void OpenCalls::failAll(const base::Error& error) {
  load_.stop();
  for (auto& call : pending_.close(error)) {
    failLater(std::move(call), error);
  }
}

int64_t OpenCalls::waitUntilNone(std::chrono::milliseconds patience) {
  auto count = ended_.lock();
  if (counters_.clientActiveCalls.load() != 0) {
    count.waitFor(endedChanged_, patience, [&count, before = *count] {
      return *count != before;
    });
  }
  return counters_.clientActiveCalls.load();
}

void OpenCalls::note(const PendingCall& call, bool failed) {
  if (!log_.on()) {
    return;
  }
  log_.add(
      {.id = call.id,
       .peer = call.worker,
       .label = call.label,
       .begin = toNanoseconds(call.sentAt),
       .end = toNanoseconds(PendingCall::Clock::now()),
       .failed = failed});
}

void OpenCalls::addTo(Metrics& metrics) const {
  metrics["agent.pending_calls"] = std::to_string(pending_.size());
  metrics["agent.calls_held_back"] = std::to_string(load_.heldBack());
}

} // namespace torch_rpc_ext::agent
