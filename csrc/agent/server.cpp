// The serving side: runs requests and sends their answers.

#include "agent/server.h"

#include "agent/call_label.h"
#include "agent/context_cleanup.h"
#include "agent/damage.h"
#include "agent/failure_message.h"
#include "agent/rpc_error.h"
#include "agent/served_call.h"
#include "base/boundary.h"
#include "base/log.h"

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

namespace {

// How long this thread has waited for the GIL so far.
thread_local std::chrono::nanoseconds waitedForGil{0};

// The RRef that a RREF_USER_DELETE deletes; nothing where it names none.
std::optional<rpc::RRefId> deletedRRef(const Decoder& decoder) {
  if (decoder.payloadIsBulk()) { // not by torch, whose payload is small
    return std::nullopt;
  }
  const auto payload = decoder.payload();
  const auto* const bytes = static_cast<const char*>(payload.data);
  try {
    return ownedRRef(*c10::make_intrusive<rpc::Message>(
        std::vector<char>(bytes, bytes + payload.size),
        std::vector<at::Tensor>{},
        rpc::MessageType::RREF_USER_DELETE));
  } catch (const std::exception&) {
    return std::nullopt; // serve() answers with the error
  }
}

// Whether the request was read: execute() then moves its message away.
bool wasRead(Arrival& arrival) {
  auto& message = arrival.message;
  return message && message->ok() && message->value() == nullptr;
}

} // namespace

struct Server::Served {
  Asker asker;
  PendingCall::Clock::time_point arrived;
  PendingCall::Clock::time_point started;
  // Set while the log of calls is on.
  std::string label = {};
  std::chrono::nanoseconds gilWait{0};
};

Server::Server(
    const AgentOptions& options,
    Executor& executor,
    metrics::Counters& counters,
    ReceiveMemory& memory,
    Group& group,
    Devices& devices,
    UnreadRRefs& unreadRRefs,
    rpc::RequestCallback& callback,
    ExceptionEncoder encodeException)
    : executor_(executor),
      counters_(counters),
      memory_(memory),
      group_(group),
      devices_(devices),
      unreadRRefs_(unreadRRefs),
      callback_(callback),
      encodeException_(std::move(encodeException)),
      queuedFrames_(options.receiveBudgetBytes),
      heldCalls_(options.receiveBudgetBytes),
      answers_(
          options,
          executor,
          counters,
          memory,
          group,
          unreadRRefs,
          devices) {
  executor_.setFullHook([this](size_t waiting, double seconds) {
    sayThatAllAreBusy(waiting, seconds);
  });
}

void Server::sayThatAllAreBusy(size_t waiting, double seconds) {
  const std::string running = runningRequests_.describe();
  waiting += memory_.admission().load().waitingRequests;
  base::log(
      base::LogLevel::kWarning,
      "all " + std::to_string(executor_.requestThreads()) +
          " threads for requests have been busy for " +
          std::to_string(static_cast<int>(seconds)) + " s, and " +
          std::to_string(waiting) + " requests wait. Running: " +
          (running.empty() ? "the copies of arguments and answers" : running) +
          ". More threads (option num_worker_threads) or shorter functions "
          "would help");
}

std::shared_ptr<void> Server::frameAhead(Creations::Caller caller) {
  return creations_->begin(caller);
}

bool Server::announced(Arrival& arrival) {
  const bool others = queuedFrames_.bytes() != 0;
  arrival.frame = queuedFrames_.hold(arrival.incoming->head().size);
  if (others && queuedFrames_.exceeded() && arrival.isForItsCaller()) {
    refuse(arrival);
    return false;
  }
  if (mayCreateRRef(
          static_cast<rpc::MessageType>(arrival.header().messageType))) {
    auto& ahead = arrival.incoming->ahead;
    arrival.creation = ahead == nullptr
        ? creations_->begin(arrival.connection.get())
        : std::static_pointer_cast<Creations::Begun>(std::move(ahead));
  }
  return true;
}

void Server::refuse(const Arrival& arrival) {
  metrics::add(counters_.callsNotBegun, 1);
  const base::Error why =
      overloaded(queuedFrames_, "the requests that wait there for a thread");
  // The caller may hear what became of its tensors before it gets the answer,
  // so it gets this reason there, too.
  arrival.incoming->refuse(why);
  const Asker asker{
      .connection = arrival.connection, .callId = arrival.header().callId};
  executor_.submit(base::makeTask([this, asker, why] {
    answers_.send(asker, makeFailure(why.kind, why.message));
  }));
}

base::Error Server::overloaded(const WaitingBytes& waiting, const char* what) {
  return {
      base::ErrorKind::kOverloaded,
      "worker \"" + group_.self().name_ + "\" did not begin the call: " + what +
          " take " + std::to_string(waiting.bytes()) + " bytes, of " +
          std::to_string(waiting.limit()) +
          " (the larger of its receive_budget and 64 MiB). Wait for some of "
          "the calls, or lower max_calls_in_flight or max_bytes_in_flight"};
}

base::Result<WaitingBytes::Held> Server::hold(uint64_t bytes, bool mayRefuse) {
  const bool others = heldCalls_.bytes() != 0;
  auto held = heldCalls_.hold(bytes);
  if (mayRefuse && others && heldCalls_.exceeded()) {
    metrics::add(counters_.callsNotBegun, 1);
    return overloaded(
        heldCalls_,
        "the requests that wait there for their functions to begin");
  }
  return held;
}

void Server::arrived(ArrivalPtr arrival) {
  if (arrival->header().messageType != rpc::MessageType::RREF_USER_DELETE) {
    arrival->at = PendingCall::Clock::now();
    serveLater(std::move(arrival));
    return;
  }
  const auto* const caller = arrival->connection.get();
  creations_->afterBegun(
      caller,
      [&decoder = *arrival->decoder] { return deletedRRef(decoder); },
      [this, arrival] {
        arrival->at = PendingCall::Clock::now();
        serveLater(arrival);
      });
}

void Server::serveLater(ArrivalPtr arrival) {
  executor_.submitRequest(base::makeTask([this, arrival = std::move(arrival)] {
    // Read now: serve() may drop the header.
    const uint64_t id = arrival->header().callId;
    base::guarded(
        base::Boundary::kRequest,
        [&] { serve(arrival); },
        [&](const base::Error& error) {
          answers_.send(
              {.connection = arrival->connection, .callId = id},
              makeFailure(
                  error.kind,
                  "worker \"" + group_.self().name_ +
                      "\" could not serve the call: " + error.message,
                  wasRead(*arrival) ? Read::kYes : Read::kNo));
        });
  }));
}

void Server::serve(const ArrivalPtr& arrival) {
  const auto started = PendingCall::Clock::now();
  if (!devices_.decode(arrival, [this, arrival] { serveLater(arrival); })) {
    return;
  }
  Served served{
      .asker =
          {arrival->connection,
           arrival->header().callId,
           arrival->header().answer,
           arrival->decoder->isChecked()},
      .arrived = arrival->at,
      .started = started};
  counters_.queue.add(served.started - served.arrived);
  if (!arrival->message->ok()) {
    answerDamaged(*arrival, served.asker);
    return;
  }
  arrival->decoder.reset();
  const uint64_t bytes = arrival->room.bytes() + arrival->frame.bytes();
  arrival->room.release();
  arrival->frame.release();
  auto& message = arrival->message->value();
  if (arrival->creation != nullptr && !createsRRef(*message)) {
    arrival->creation.reset();
  }
  const bool givenUp = arrival->givenUp(started) && isUserCall(message->type());
  if (givenUp) {
    notBegun(*arrival);
    const auto& payload = message->payload();
    if (arrival->creation == nullptr &&
        !mayHoldRRefs({payload.data(), payload.size()})) {
      return; // the caller has an error already
    }
    // The callback reads the request and does not call its function
    // (request_callback.cpp): so the RRefs in the request are confirmed, and
    // the RRef that it makes gets an error, for which others may wait.
  }
  auto future = begin(*arrival, served, givenUp, bytes);
  answerWhenDone(std::move(served), std::move(future), arrival->streams);
}

void Server::answerDamaged(const Arrival& arrival, const Asker& to) {
  const base::Error& error = arrival.message->error();
  logDamage(group_.peers().nameOf(arrival.connection.get()), error);
  answers_.send(
      to,
      makeFailure(
          error.kind,
          "worker \"" + group_.self().name_ +
              "\" could not take the message: " + error.message,
          Read::kNo));
}

c10::intrusive_ptr<rpc::JitFuture>
Server::begin(Arrival& arrival, Served& served, bool givenUp, uint64_t bytes) {
  metrics::add(counters_.callsServed, 1);
  counters_.serverActiveCalls.fetch_add(1);
  auto& message = arrival.message->value();
  std::string label = labelOf(*message);
  if (log_.on()) {
    served.label = label;
  }
  const RunningRequests::Entry entry(runningRequests_, std::move(label));
  const ServedCall call{
      arrival.connection, arrival.deadline, givenUp, bytes, arrival.creation};
  const ServedCall::Scope scope(call);
  const auto before = waitedForGil;
  auto future =
      execute(std::move(message), arrival.streams, *arrival.connection);
  served.gilWait = waitedForGil - before;
  return future;
}

void Server::answerWhenDone(
    Served served,
    c10::intrusive_ptr<rpc::JitFuture> future,
    const device::Streams& streams) {
  const uint64_t id = served.asker.callId;
  if (future->completed()) {
    counters_.serverActiveCalls.fetch_sub(1);
    const device::StreamScope scope(streams);
    if (!streams.empty()) {
      future->wait(); // only makes the current streams wait
    }
    auto response = responseOf(*future, id);
    // Before the answer is sent: the memory of its tensors can be given away
    // only while nobody else refers to them.
    future.reset();
    answer(std::move(served), std::move(response));
    return;
  }
  counters_.serverActiveAsyncCalls.fetch_add(1);
  future->addCallback(
      [this, id, served = std::move(served)](rpc::JitFuture& done) {
        counters_.serverActiveCalls.fetch_sub(1);
        counters_.serverActiveAsyncCalls.fetch_sub(1);
        base::guarded(
            base::Boundary::kAnswer,
            [&] { answer(served, responseOf(done, id)); },
            [&](const base::Error& error) {
              answers_.sendError(served.asker.connection, id, error);
            });
      });
}

void Server::notBegun(Arrival& arrival) {
  metrics::add(counters_.callsNotBegun, 1);
  const std::string what = arrival.message
      ? labelOf(*arrival.message->value())
      : agent::nameOf(
            static_cast<rpc::MessageType>(arrival.header().messageType));
  base::log(
      base::LogLevel::kDebug,
      "did not begin " + what + " for worker \"" +
          group_.peers().nameOf(arrival.connection.get()) + "\": " +
          (arrival.connection->closed() ? "its connection has ended"
                                        : "its time-out has passed"));
}

void Server::answer(Served served, c10::intrusive_ptr<rpc::Message> response) {
  const auto now = PendingCall::Clock::now();
  counters_.execution.add(now - served.started);
  if (log_.on() && !served.label.empty()) {
    // Before the answer is sent: the caller may ask for the log next.
    log_.add(
        {.id = served.asker.callId,
         .peer = group_.peers().nameOf(served.asker.connection.get()),
         .label = std::move(served.label),
         .begin = toNanoseconds(served.arrived),
         .start = toNanoseconds(served.started),
         .end = toNanoseconds(now),
         .gilWait = served.gilWait.count(),
         .bytes = bytesOf(*response)});
  }
  if (served.asker.connection->closed()) {
    unreadRRefs_.undelivered(*response);
    return;
  }
  answers_.send(served.asker, std::move(response));
}

c10::intrusive_ptr<rpc::JitFuture> Server::execute(
    c10::intrusive_ptr<rpc::Message> request,
    device::Streams streams,
    const transport::Connection& from) {
  const ContextCleanup::Serving serving(*request, &from);
  try {
    return callback_(*request, std::move(streams));
  } catch (const std::exception& error) {
    auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    future->setError(std::make_exception_ptr(std::runtime_error(error.what())));
    return future;
  }
}

c10::intrusive_ptr<rpc::Message> Server::responseOf(
    rpc::JitFuture& future,
    uint64_t callId) const {
  if (!future.hasError()) {
    return future.value().toCustomClass<rpc::Message>();
  }
  const std::exception_ptr error = future.exception_ptr();
  // An asynchronous function may return the future of a call of its own.
  if (auto response = encodeException_ ? encodeException_(error) : nullptr) {
    return response;
  }
  try {
    std::rethrow_exception(error);
  } catch (const Refusal& refusal) {
    return makeFailure(refusal.kind(), refusal.what());
  } catch (...) {
    return rpc::createExceptionResponse(
        future.tryRetrieveErrorMessage(), static_cast<int64_t>(callId));
  }
}

void Server::addGilWaitTime(std::chrono::microseconds wait) {
  waitedForGil += wait;
  counters_.gilWait.add(wait);
}

void Server::lose(const transport::Connection* connection) {
  for (auto& tell : lostCallers_.take(connection)) {
    executor_.submitCompletion(base::makeTask(std::move(tell)));
  }
}

void Server::stop() {
  creations_->stop();
}

void Server::addTo(Metrics& metrics) const {
  metrics["agent.queued_frame_bytes"] = std::to_string(queuedFrames_.bytes());
  metrics["agent.held_call_bytes"] = std::to_string(heldCalls_.bytes());
}

} // namespace torch_rpc_ext::agent
