// UcxAgent, the calling side: from a message to the future of its answer.

#include "agent/call_label.h"
#include "agent/creation_failure.h"
#include "agent/failure_message.h"
#include "agent/rpc_error.h"
#include "agent/ucx_agent.h"
#include "base/boundary.h"
#include "base/log.h"

#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace torch_rpc_ext::agent {

namespace {

// The call that this thread is handing to its connection right now.
struct BeingSent {
  uint64_t id = 0; // none
  // To be filled before it leaves, if this thread waits for the answer.
  std::optional<Executor::Leader>* leader = nullptr;
};
thread_local BeingSent beingSent;

class BeingSentScope {
 public:
  explicit BeingSentScope(BeingSent call)
      : before_(std::exchange(beingSent, call)) {}
  ~BeingSentScope() {
    beingSent = before_;
  }
  BeingSentScope(const BeingSentScope&) = delete;
  BeingSentScope& operator=(const BeingSentScope&) = delete;

 private:
  const BeingSent before_;
};

// With more bytes than this a call takes milliseconds, in which who waits for
// it does not lead: a small call of another thread does better.
constexpr uint64_t kMaxLedBytes = uint64_t{8} << 20;

// The last call of this thread to another worker.
struct LastCall {
  const UcxAgent* agent = nullptr;
  uint64_t id = 0;
  bool leads = true; // who waits for it
};
thread_local LastCall lastCall;
// This thread waits for the answer to the call that it makes next.
thread_local bool synchronous = false;

// See creation_failure.h.
thread_local std::exception_ptr creationFailed;

// Whether the sender of `request` waits at once for the answer.
bool isAwaited(const rpc::Message& request) {
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

// Upstream's callback for the creation of an RRef lets go of the RRef for one
// type of error only; for any other it throws, and the RRef waits for ever.
rpc::RPCErrorType typeOf(const PendingCall& call, base::ErrorKind kind) {
  return kind == base::ErrorKind::kTimedOut || call.createsRRef
      ? rpc::RPCErrorType::TIMEOUT
      : rpc::RPCErrorType::UNKNOWN_ERROR;
}

// What a future with these devices has to know of: it refuses storages of the
// meta device, on which nothing is queued.
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

// Upstream takes a negative time-out for one that is over already, and NaN for
// whatever the processor makes of NaN.
void checkTimeout(float seconds, std::chrono::milliseconds preset) {
  if (seconds == rpc::kUnsetRpcTimeout) {
    if (preset.count() < 0) {
      throw std::invalid_argument(
          "the default time-out of calls is " + std::to_string(preset.count()) +
          " ms: give rpc._set_rpc_timeout() seconds, 0 for no time-out");
    }
  } else if (!(seconds >= 0)) {
    throw std::invalid_argument(
        c10::str(
            "timeout must be a number of seconds, 0 for none, or -1 for the "
            "default of the options, got ",
            seconds));
  }
}

// What the text of a time-out says about a request that still waits here.
std::string whyUntaken(const PendingCall& call) {
  const uint64_t bytes = call.untaken == nullptr ? 0 : call.untaken->load();
  return bytes == 0 ? ""
                    : ", and has not taken the " + std::to_string(bytes) +
          " bytes of the call yet: it takes no more than its receive_budget "
          "before it serves what it has";
}

// For how long the caller still waits, in ms, as the frame says it: at least 1;
// 0 without limit, or for more than fits.
uint32_t timeLeft(const PendingCall& call) {
  if (call.timeout.count() <= 0 || call.timeout.count() > UINT32_MAX) {
    return 0;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(
      call.sentAt + call.timeout - PendingCall::Clock::now());
  return static_cast<uint32_t>(std::max<int64_t>(left.count(), 1));
}

template <typename F>
void sayWhatWasRaised(const PendingCall& call, F&& complete) {
  try {
    complete();
  } catch (const c10::Error& error) {
    base::log(
        base::LogLevel::kInfo,
        "a callback of " + call.label + " on worker \"" + call.worker +
            "\" raised: " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    base::log(
        base::LogLevel::kInfo,
        "a callback of " + call.label + " on worker \"" + call.worker +
            "\" raised: " + error.what());
  }
}

// Completes a future, which runs its callbacks. Some of upstream's throw when
// the call has failed; without this the process would end.
template <typename F>
void settle(const PendingCall& call, F&& complete) {
  base::guarded(
      base::Boundary::kFuture,
      [&] { sayWhatWasRaised(call, complete); },
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

c10::intrusive_ptr<rpc::JitFuture> UcxAgent::send(
    const rpc::WorkerInfo& to,
    c10::intrusive_ptr<rpc::Message> message,
    float rpcTimeoutSeconds,
    const rpc::DeviceMap& deviceMap) {
  TORCH_CHECK(
      message->isRequest(), "UcxAgent::send(..) is only for sending requests.");
  if (!rpcAgentRunning_.load()) {
    throw std::runtime_error(
        c10::str(
            "Node ",
            RpcAgent::getWorkerInfo().id_,
            " tried to send() a message of type ",
            static_cast<int>(message->type()),
            " but RPC is no longer running on this node."));
  }
  checkTimeout(rpcTimeoutSeconds, getRpcTimeout());
  PendingCall call;
  call.future = c10::make_intrusive<rpc::JitFuture>(
      at::AnyClassType::get(), devices_.devices());
  call.worker = to.name_;
  call.to = to.id_;
  call.label = labelOf(*message);
  call.createsRRef = createsRRef(*message);
  call.timeout = rpcTimeoutSeconds == rpc::kUnsetRpcTimeout
      ? getRpcTimeout()
      : toMilliseconds(rpcTimeoutSeconds);
  call.sentAt = PendingCall::Clock::now();
  call.scope = executor_.currentRequest();
  auto future = call.future;
  if (call.scope) {
    executor_.beginNested(call.scope);
  }
  counters_.clientActiveCalls.fetch_add(1);
  metrics::add(counters_.callsSent, 1);
  if (base::Error error = ownerDied(*message, to.id_)) {
    fail(std::move(call), error);
    return future;
  }
  if (base::Error error = limit(call, *message)) {
    fail(std::move(call), error);
    return future;
  }
  const uint32_t timeout = timeLeft(call);
  const uint64_t id = pending_.add(std::move(call));

  device::Route route{.receiver = &to.name_};
  if (!deviceMap.empty()) {
    route.map = &deviceMap;
  } else if (devices_.any()) {
    route.map = devices_.mapTo(to.name_);
  }
  const bool waits = to.id_ != workerInfo_.id_ && isAwaited(*message);
  base::Error error;
  std::optional<Executor::Leader> leader;
  try {
    const transport::ConnectionPtr connection = peers_.connection(to.id_);
    const EncodeOptions options =
        requestOptions(id, timeout, to.name_, connection);
    lastCall = {to.id_ == workerInfo_.id_ ? nullptr : this, id};
    if (device::anyOn(message->tensors())) {
      error = sendFromDevices(options, message, route, connection);
    } else {
      auto encoded = encode(message, options, route);
      error = encoded.ok() ? base::Error() : encoded.error();
      if (!error) {
        lastCall.leads = encoded.value().totalBytes <= kMaxLedBytes;
        const BeingSentScope scope(
            {id, waits && lastCall.leads ? &leader : nullptr});
        sendCall(id, std::move(encoded.value()), connection);
      }
    }
  } catch (const std::exception&) {
    withdraw(id);
    throw;
  }
  if (error) {
    // As upstream does for tensors that it cannot send: raised where the call
    // is made.
    withdraw(id);
    throw std::runtime_error(error.message);
  }
  if (waits) {
    if (leader && leader->leads()) {
      bool signals = false;
      lead(*leader, *future, signals);
    } else {
      receive(id, *future);
    }
    // After a second, or a signal of the system, the wait goes on in await().
    synchronous = synchronous && !future->completed();
  }
  return future;
}

void UcxAgent::withdraw(uint64_t callId) {
  if (auto call = pending_.take(callId)) {
    callEnded(*call);
  }
}

void UcxAgent::sendCall(
    uint64_t callId,
    Encoded encoded,
    const transport::ConnectionPtr& connection) {
  if (encoded.bulk.empty() || !connection->sharesMemory()) {
    sendCallNow(callId, std::move(encoded), connection);
    return;
  }
  trimLater();
  lender_.lend(std::move(encoded), [this, callId, connection](Encoded lent) {
    if (pending_.contains(callId)) { // else it has timed out
      sendCallNow(callId, std::move(lent), connection);
    }
  });
}

void UcxAgent::sendCallNow(
    uint64_t callId,
    Encoded encoded,
    const transport::ConnectionPtr& connection) {
  UntakenPtr untaken;
  if (!encoded.bulk.empty() && encoded.lent.empty()) {
    untaken = std::make_shared<std::atomic<uint64_t>>(encoded.totalBytes);
  }
  pending_.setSent(callId, connection, untaken);
  metrics::add(counters_.bytesSent, encoded.totalBytes);
  counters_.messageBytes.add(encoded.totalBytes);
  // Holds the memory that `bulk` points into until the peer has taken it, even
  // when the call has timed out long since.
  const bool borrows = encoded.borrows();
  base::Buffer head = std::move(encoded.head);
  std::vector<transport::BulkSpan> bulk = std::move(encoded.bulk);
  if (beingSent.id == callId && beingSent.leader != nullptr) {
    // Now and not after it has been sent: the answer may be there before this
    // thread is on a core again, and would wake one of the pool.
    beingSent.leader->emplace(executor_);
  }
  connection->send(
      std::move(head),
      std::move(bulk),
      [this,
       callId,
       untaken,
       held = borrows ? std::make_shared<Encoded>(std::move(encoded))
                      : nullptr](const base::Error& error) {
        if (untaken != nullptr) {
          untaken->store(0);
        }
        if (held != nullptr && held->parcel != nullptr) {
          held->parcel->sent(error);
        }
        if (!error) {
          return;
        }
        if (held != nullptr) {
          held->discard();
        }
        auto call = pending_.take(callId);
        if (!call) {
          return;
        }
        if (beingSent.id == callId) {
          // Nobody has the future yet, so no user code hangs on it; and
          // upstream's RRefs expect such an error before send() returns.
          fail(std::move(*call), error);
        } else {
          failLater(std::move(*call), error);
        }
      });
}

bool UcxAgent::setSynchronous(bool value) {
  return std::exchange(synchronous, value);
}

void UcxAgent::await(
    rpc::JitFuture& future,
    const std::function<void()>& interrupted) {
  bool signals = false;
  while (lastCall.agent == this && !future.completed()) {
    std::optional<Executor::Leader> leader;
    if (lastCall.leads) {
      leader.emplace(executor_);
    }
    if (leader && leader->leads() ? lead(*leader, future, signals)
                                  : receive(lastCall.id, future)) {
      return;
    }
    leader.reset(); // what runs now may take long
    interrupted();
  }
}

bool UcxAgent::lead(
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

bool UcxAgent::receive(uint64_t callId, rpc::JitFuture& future) {
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

uint64_t UcxAgent::lastCallId() {
  return lastCall.id;
}

bool UcxAgent::awaitedHere(uint64_t callId) const {
  return executor_.leads() && lastCall.agent == this && lastCall.id == callId;
}

base::Error UcxAgent::limit(PendingCall& call, const rpc::Message& message) {
  if (!isUserCall(message.type())) {
    return {}; // what others wait for: RRefs, backward passes, shutdown
  }
  if (load_.countsBytes()) {
    call.bytes = bytesOf(message);
  }
  base::Error error = load_.begin(
      call.to,
      call.bytes,
      call.timeout.count() > 0 ? call.sentAt + call.timeout
                               : PendingCall::Clock::time_point::max());
  call.limited = !error;
  return error;
}

void UcxAgent::callEnded(const PendingCall& call) {
  if (call.limited) {
    load_.end(call.to, call.bytes);
  }
  if (call.scope) {
    executor_.endNested(call.scope);
  }
  if (call.counted) {
    std::lock_guard lock(callCountMutex_);
    counters_.clientActiveCalls.fetch_sub(1);
    callCountChanged_.notify_all();
  }
}

void UcxAgent::finish(
    PendingCall call,
    c10::intrusive_ptr<rpc::Message> message) {
  std::exception_ptr raised;
  try {
    raised = exceptionDecoder_ ? exceptionDecoder_(*message) : nullptr;
  } catch (const std::exception&) {
    failed(call, std::current_exception());
    callEnded(call);
    return;
  }
  const auto kind = failureKind(*message);
  if (kind || message->type() == rpc::MessageType::EXCEPTION) {
    std::string text(message->payload().begin(), message->payload().end());
    if (kind == base::ErrorKind::kCorrupted) {
      fail(std::move(call), {*kind, text});
      return;
    }
    if (call.createsRRef) {
      text = rpc::makeRPCError(text, rpc::RPCErrorType::TIMEOUT);
    }
    raised = kind ? std::make_exception_ptr(RpcError(*kind, call.worker, text))
                  : std::make_exception_ptr(std::runtime_error(text));
  }
  if (raised != nullptr) {
    failed(call, std::move(raised));
  } else {
    counters_.latency.add(PendingCall::Clock::now() - call.sentAt);
    log(call, /*failed=*/false);
    auto storages = storagesOf(*message, call.future->devices());
    settle(call, [&] {
      call.future->markCompleted(
          c10::IValue(std::move(message)), std::move(storages));
    });
  }
  callEnded(call);
}

void UcxAgent::failed(const PendingCall& call, std::exception_ptr why) {
  metrics::add(counters_.callsFailed, 1);
  log(call, /*failed=*/true);
  if (call.beforeFailure) {
    call.beforeFailure();
  }
  settle(call, [&] { call.future->setError(std::move(why)); });
}

void UcxAgent::fail(PendingCall call, const base::Error& error) {
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
    text = error.message; // already in upstream's form (fault injection)
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
  failed(call, why);
  callEnded(call);
}

void UcxAgent::failLater(PendingCall call, const base::Error& error) {
  std::shared_ptr<PendingCall> held; // both here and by the task
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

} // namespace torch_rpc_ext::agent
