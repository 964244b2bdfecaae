// UcxAgent, the receiving side: frames become requests that are served and
// responses that complete calls.

#include "agent/arrival.h"
#include "agent/call_label.h"
#include "agent/failure_message.h"
#include "agent/rpc_error.h"
#include "agent/served_call.h"
#include "agent/ucx_agent.h"
#include "base/boundary.h"
#include "base/log.h"
#include "compat/torch_compat.h"

namespace torch_rpc_ext::agent {

namespace {

constexpr double kTrimsPerIdleTime = 3;

// What this thread has waited for the GIL so far.
thread_local std::chrono::nanoseconds waitedForGil{0};

base::Timer::Clock::duration toDuration(double seconds) {
  return std::chrono::duration_cast<base::Timer::Clock::duration>(
      std::chrono::duration<double>(seconds));
}

// The machine or the network does what nobody should have to look for.
void logDamage(const std::string& worker, const base::Error& error) {
  if (error.kind == base::ErrorKind::kCorrupted) {
    base::log(
        base::LogLevel::kWarning,
        "from worker \"" + worker + "\": " + error.message);
  }
}

} // namespace

struct UcxAgent::Served {
  Asker asker;
  PendingCall::Clock::time_point arrived;
  PendingCall::Clock::time_point started;
  // While it is logged.
  std::string label = {};
  std::chrono::nanoseconds gilWait{0};
};

// ---- transport::Handler ----------------------------------------------------

std::string UcxAgent::introduction() {
  return peers_.introduction();
}

base::Error UcxAgent::onAccept(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  auto error = peers_.onAccept(connection, hello);
  heardOf(connection);
  return error;
}

base::Error UcxAgent::onConnected(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  auto error = peers_.onConnected(connection, hello);
  heardOf(connection);
  return error;
}

void UcxAgent::heardOf(const transport::ConnectionPtr& connection) {
  // Still lost is one that was refused, or only asks whether it may come back:
  // the end of the group must not wait for it.
  const std::string name = peers_.nameOf(connection.get());
  if (!peers_.isLost(name)) {
    barrier_.regain(name);
    events_.heardOf(name);
  }
}

void UcxAgent::onClosed(
    const transport::ConnectionPtr& connection,
    const base::Error& error) {
  const std::string name = peers_.nameOf(connection.get());
  const auto gone = peers_.onClosed(connection, error);
  admission_.forget(connection.get());
  base::log(
      base::LogLevel::kInfo,
      "the connection to worker \"" + name + "\" ended: " + error.message);
  for (auto& call : pending_.takeAll(connection.get())) {
    failLater(std::move(call), error);
  }
  for (auto& tell : callers_.take(connection.get())) {
    executor_.submitCompletion(base::makeTask(std::move(tell)));
  }
  if (gone) {
    const bool died = connection->peer() == transport::PeerState::kDead;
    const bool left = connection->peer() == transport::PeerState::kLeft;
    ipc_->gone(*gone, died || left);
    barrier_.lose(
        *gone, {error.kind, "worker \"" + *gone + "\": " + error.message});
    events_.unreachable(*gone, left, error.message);
    if (const auto id = membership_.idOf(*gone)) {
      release(membership_.find(*id), died);
    }
  }
}

void UcxAgent::release(const Membership::MemberPtr& worker, bool died) {
  if (worker == nullptr || stopped_.load()) {
    return;
  }
  // Sends to the others that took part; not for the thread that polls.
  executor_.submit(base::makeTask([this, worker, died] {
    const auto id = static_cast<rpc::worker_id_t>(worker->info.id_);
    // It may have come back meanwhile, and begun anew.
    const auto now = membership_.find(id);
    std::optional<uint32_t> successor;
    if (now != nullptr && now->life > worker->life) {
      successor = now->life;
    }
    const size_t contexts = compat::releaseAutogradOf(id, successor);
    // One that cannot be reached may be heard of again, and use its RRefs.
    RRefs values;
    if (died) {
      values = compat::releaseRRefsOf(id, successor);
    }
    if (contexts + values.size() != 0) {
      base::log(
          base::LogLevel::kInfo,
          "released " + std::to_string(contexts) +
              " distributed autograd contexts and " +
              std::to_string(values.size()) + " values of RRefs of worker \"" +
              worker->info.name_ + "\"");
    }
    if (!values.empty() && dropValues_) {
      dropValues_(std::move(values));
    }
  }));
}

void UcxAgent::onFrame(
    const transport::ConnectionPtr& connection,
    std::unique_ptr<transport::Incoming> incoming) {
  auto decoder = Decoder::parse(incoming->head());
  if (!decoder.ok()) {
    // A peer that speaks like this cannot be talked to: ending the connection
    // gives both sides an error instead of a time-out.
    base::log(
        base::LogLevel::kWarning,
        "closing the connection to worker \"" +
            peers_.nameOf(connection.get()) + "\": " + decoder.error().message);
    incoming->refuse(decoder.error());
    connection->close();
    return;
  }
  auto arrival = std::make_shared<Arrival>();
  arrival->connection = connection;
  arrival->incoming = std::move(incoming);
  arrival->decoder.emplace(std::move(decoder.value()));
  if (arrival->decoder->hasBeside()) {
    arrival->beside = wayFrom(connection, arrival->decoder->note());
  }
  uint64_t bytes = arrival->incoming->head().size;
  for (const uint64_t size : arrival->incoming->bulkSizes()) {
    bytes += size;
  }
  metrics::add(counters_.bytesReceived, bytes);
  const wire::CallHeader& header = arrival->header();
  const bool response = header.kind == wire::CallKind::kResponse;
  if (response && !pending_.contains(header.callId)) {
    return; // the call has timed out: nobody wants the bulk any more
  }
  if (header.timeout != 0) {
    arrival->deadline =
        PendingCall::Clock::now() + std::chrono::milliseconds(header.timeout);
  }
  if (!response) {
    const bool others = queuedFrames_.bytes() != 0;
    arrival->frame = queuedFrames_.hold(arrival->incoming->head().size);
    if (others && queuedFrames_.exceeded() && arrival->isForItsCaller()) {
      refuse(*arrival);
      return;
    }
    if (mayCreateRRef(static_cast<rpc::MessageType>(header.messageType))) {
      arrival->creation = creations_.begin(connection.get());
    }
  }
  const Executor::Claim claim(response && awaitedHere(header.callId));
  if (arrival->incoming->bulkSizes().empty()) {
    auto none = arrival->decoder->allocate(*cache_, {}, devices_.devices());
    if (!none.ok()) {
      arrival->error = none.error();
    }
    dispatch(std::move(arrival));
    return;
  }
  // Mapping memory and copying are not for the thread that polls.
  const uint64_t toCopy = response ? 0 : arrival->incoming->bytesToCopy();
  if (toCopy != 0) {
    fetchWhenAdmitted(std::move(arrival), toCopy);
    return;
  }
  const auto mailbox = response ? pending_.mailboxOf(header.callId) : nullptr;
  base::TaskPtr fetch = base::makeTask(
      [this, arrival = std::move(arrival)] { fetchBulk(arrival); });
  if (mailbox == nullptr || !mailbox->put(fetch)) {
    executor_.submit(std::move(fetch));
  }
}

void UcxAgent::refuse(const Arrival& arrival) {
  metrics::add(counters_.callsNotBegun, 1);
  const Asker asker{
      .connection = arrival.connection, .callId = arrival.header().callId};
  executor_.submit(base::makeTask([this, asker] {
    const std::string text = "worker \"" + workerInfo_.name_ +
        "\" did not begin the call: the requests that wait there for a thread "
        "take " +
        std::to_string(queuedFrames_.bytes()) + " bytes, of " +
        std::to_string(queuedFrames_.limit()) +
        " (the larger of its receive_budget and 64 MiB). Wait for some of the "
        "calls, or lower max_calls_in_flight";
    reply(asker, makeFailure(base::ErrorKind::kOverloaded, text));
  }));
}

void UcxAgent::fetchWhenAdmitted(
    std::shared_ptr<Arrival> arrival,
    uint64_t bytes) {
  const auto* const caller = arrival->connection.get();
  admission_.request(
      caller,
      bytes,
      [this, arrival = std::move(arrival)](Admission::Room room) {
        arrival->room = std::move(room);
        executor_.submit(
            base::makeTask([this, arrival] { fetchBulk(arrival); }));
      });
}

void UcxAgent::fetchBulk(std::shared_ptr<Arrival> arrival) {
  if (arrival->isForNobody()) {
    notBegun(*arrival);
    arrival->incoming->refuse(
        {base::ErrorKind::kTimedOut, "the caller has given the call up"});
    return;
  }
  auto* const incoming = arrival->incoming.get();
  std::vector<base::MutableSpan> into;
  transport::Incoming::Arrived arrived;
  base::guarded(
      base::Boundary::kFetch,
      [&] {
        auto spans = arrival->decoder->allocate(
            *cache_,
            incoming->bulkSizes(),
            devices_.devices(),
            [incoming](size_t index) { return incoming->adopt(index); });
        if (!spans.ok()) {
          arrival->error = spans.error();
          return;
        }
        trimLater();
        arrived = landEarly(*arrival);
        into = std::move(spans.value());
        if (arrival->isRequest()) {
          uint64_t copied = 0;
          for (const auto& span : into) {
            copied += span.data == nullptr ? 0 : span.size;
          }
          admission_.grow(arrival->room, arrival->connection.get(), copied);
        }
      },
      [&](const base::Error& error) { arrival->error = error; });
  if (arrival->error) {
    incoming->refuse(arrival->error);
    dispatch(std::move(arrival));
    return;
  }
  incoming->receive(
      std::move(into),
      [this, arrival = std::move(arrival)](const base::Error& error) {
        arrival->error = error;
        dispatch(arrival);
      },
      std::move(arrived));
}

void UcxAgent::trimLater() {
  if (!trimming_.exchange(true)) {
    trimTimer_.set(
        base::Timer::Clock::now() +
        toDuration(options_.receiveCacheIdleSeconds / kTrimsPerIdleTime));
  }
}

void UcxAgent::trim() {
  const auto idle = memory::isShort()
      ? base::Timer::Clock::duration::zero()
      : toDuration(options_.receiveCacheIdleSeconds);
  cache_->trim(idle);
  const bool more = remote_->trim(idle);
  const bool isOpen = ipc_->stats().open != 0;
  if (isOpen) {
    // To close a handle may take a while.
    executor_.submit(base::makeTask([ipc = ipc_, idle] { ipc->trim(idle); }));
  }
  trimming_.store(false);
  const auto stats = cache_->stats();
  if (more || isOpen || stats.idleBlocks + stats.usedBlocks != 0) {
    trimLater();
  }
}

void UcxAgent::dispatch(std::shared_ptr<Arrival> arrival) {
  if (arrival->header().kind == wire::CallKind::kResponse) {
    // Taken here and not by the completion: what has arrived stays arrived,
    // also when the peer closes the connection in the next moment.
    arrival->call = pending_.take(arrival->header().callId);
    if (!arrival->call) {
      return; // timed out meanwhile
    }
    completeLater(std::move(arrival));
  } else if (arrival->header().messageType == kBarrierRequestType) {
    // Never waits for a free thread: it is what ends the group.
    executor_.submit(base::makeTask([this, arrival = std::move(arrival)] {
      auto message = arrival->decoder->finish();
      if (message.ok()) {
        serveBarrier(
            arrival->connection, arrival->header().callId, *message.value());
      }
    }));
  } else if (isIpcType(arrival->header().messageType)) {
    executor_.submit(base::makeTask([this, arrival = std::move(arrival)] {
      serveIpc(*arrival);
    }));
  } else if (
      arrival->header().messageType == rpc::MessageType::RREF_USER_DELETE) {
    const auto* const caller = arrival->connection.get();
    creations_.afterThose(caller, [this, arrival = std::move(arrival)] {
      arrival->at = PendingCall::Clock::now();
      serveLater(arrival);
    });
  } else {
    arrival->at = PendingCall::Clock::now();
    serveLater(std::move(arrival));
  }
}

void UcxAgent::completeLater(std::shared_ptr<Arrival> arrival) {
  const auto mailbox = arrival->call->mailbox;
  base::TaskPtr task = base::makeTask([this, arrival = std::move(arrival)] {
    base::guarded(
        base::Boundary::kCompletion,
        [&] { complete(arrival); },
        [&](const base::Error& error) {
          if (arrival->call->future != nullptr) { // else it has failed
            fail(std::move(*arrival->call), error);
          }
        });
  });
  if (mailbox == nullptr || !mailbox->put(task)) {
    executor_.submitCompletion(std::move(task));
  }
}

void UcxAgent::serveLater(std::shared_ptr<Arrival> arrival) {
  executor_.submitRequest(base::makeTask([this, arrival = std::move(arrival)] {
    const uint64_t id = arrival->header().callId; // serve() may drop it
    base::guarded(
        base::Boundary::kRequest,
        [&] { serve(arrival); },
        [&](const base::Error& error) {
          reply(
              {.connection = arrival->connection, .callId = id},
              makeFailure(
                  error.kind,
                  "worker \"" + workerInfo_.name_ +
                      "\" could not serve the call: " + error.message));
        });
  }));
}

// ---- responses -------------------------------------------------------------

void UcxAgent::complete(const std::shared_ptr<Arrival>& arrival) {
  if (!decoded(arrival, [this, arrival] { completeLater(arrival); })) {
    return;
  }
  PendingCall& call = *arrival->call;
  auto& message = *arrival->message;
  if (!message.ok()) {
    logDamage(call.worker, message.error());
    fail(std::move(call), message.error());
    return;
  }
  // The future remembers what is queued on the current streams.
  const device::StreamScope scope(arrival->streams);
  finish(std::move(call), std::move(message.value()));
}

// ---- requests --------------------------------------------------------------

void UcxAgent::addGilWaitTime(std::chrono::microseconds wait) {
  waitedForGil += wait;
  counters_.gilWait.add(wait);
}

void UcxAgent::serve(const std::shared_ptr<Arrival>& arrival) {
  const auto started = PendingCall::Clock::now();
  if (!decoded(arrival, [this, arrival] { serveLater(arrival); })) {
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
  const device::Streams& streams = arrival->streams;
  auto& message = *arrival->message;
  if (!message.ok()) {
    logDamage(peers_.nameOf(arrival->connection.get()), message.error());
    reply(
        served.asker,
        makeFailure(
            message.error().kind,
            "worker \"" + workerInfo_.name_ +
                "\" could not take the message: " + message.error().message));
    return;
  }
  arrival->decoder.reset();
  arrival->room.release();
  arrival->frame.release();
  if (arrival->creation != nullptr && !createsRRef(*message.value())) {
    arrival->creation.reset();
  }
  if (arrival->givenUp(started) && isUserCall(message.value()->type())) {
    notBegun(*arrival);
    if (!createsRRef(*message.value())) {
      return; // the caller has an error already
    }
    // Others may hold the RRef and wait for its value, which becomes an error:
    // request_callback.cpp.
  }
  metrics::add(counters_.callsServed, 1);
  counters_.serverActiveCalls.fetch_add(1);

  c10::intrusive_ptr<rpc::JitFuture> future;
  {
    std::string label = labelOf(*message.value());
    if (servedLog_.on()) {
      served.label = label;
    }
    const RunningRequests::Entry entry(runningRequests_, std::move(label));
    const ServedCall call{arrival->connection, arrival->deadline};
    const ServedCall::Scope scope(call);
    const auto before = waitedForGil;
    future = execute(std::move(message.value()), streams);
    served.gilWait = waitedForGil - before;
  }
  const uint64_t id = served.asker.callId;
  if (future->completed()) {
    counters_.serverActiveCalls.fetch_sub(1);
    const device::StreamScope scope(streams);
    if (!streams.empty()) {
      future->wait(); // makes the current streams wait, and nothing else
    }
    auto response = responseOf(*future, id);
    // Before the answer is sent: nobody else may refer to its tensors when
    // their memory is given away.
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
              replyUnsent(served.asker.connection, id, error);
            });
      });
}

void UcxAgent::notBegun(Arrival& arrival) {
  metrics::add(counters_.callsNotBegun, 1);
  const std::string what = arrival.message
      ? labelOf(*arrival.message->value())
      : agent::nameOf(
            static_cast<rpc::MessageType>(arrival.header().messageType));
  base::log(
      base::LogLevel::kDebug,
      "did not begin " + what + " for worker \"" +
          peers_.nameOf(arrival.connection.get()) + "\": " +
          (arrival.connection->closed() ? "its connection has ended"
                                        : "its time-out has passed"));
}

void UcxAgent::answer(
    Served served,
    c10::intrusive_ptr<rpc::Message> response) {
  const auto now = PendingCall::Clock::now();
  counters_.execution.add(now - served.started);
  if (servedLog_.on() && !served.label.empty()) {
    // Before the caller hears of it, who may ask for the log next.
    servedLog_.add(
        {.id = served.asker.callId,
         .peer = peers_.nameOf(served.asker.connection.get()),
         .label = std::move(served.label),
         .begin = toNanoseconds(served.arrived),
         .start = toNanoseconds(served.started),
         .end = toNanoseconds(now),
         .gilWait = served.gilWait.count(),
         .bytes = bytesOf(*response)});
  }
  reply(served.asker, std::move(response));
}

c10::intrusive_ptr<rpc::JitFuture> UcxAgent::execute(
    c10::intrusive_ptr<rpc::Message> request,
    device::Streams streams) {
  try {
    return (*cb_)(*request, std::move(streams));
  } catch (const std::exception& error) {
    auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    future->setError(std::make_exception_ptr(std::runtime_error(error.what())));
    return future;
  }
}

c10::intrusive_ptr<rpc::Message> UcxAgent::responseOf(
    rpc::JitFuture& future,
    uint64_t callId) {
  if (!future.hasError()) {
    return future.value().toCustomClass<rpc::Message>();
  }
  try {
    std::rethrow_exception(future.exception_ptr());
  } catch (const Refusal& refusal) {
    return makeFailure(refusal.kind(), refusal.what());
  } catch (...) {
    return rpc::createExceptionResponse(
        future.tryRetrieveErrorMessage(), static_cast<int64_t>(callId));
  }
}

void UcxAgent::reply(
    const Asker& asker,
    c10::intrusive_ptr<rpc::Message> message) {
  const auto& connection = asker.connection;
  const EncodeOptions options = answerOptions(asker);
  const bool fromDevices = device::anyOn(message->tensors());
  std::string caller;
  device::Route route{.request = false};
  if (fromDevices || devices_.any()) {
    caller = peers_.nameOf(connection.get());
    route.receiver = &caller;
    route.map = devices_.mapBackTo(caller);
  }
  if (fromDevices) {
    replyFromDevices(connection, options, message, route);
    return;
  }
  auto encoded = encode(message, options, route);
  message.reset();
  if (!encoded.ok()) {
    replyUnsent(connection, asker.callId, encoded.error());
    return;
  }
  sendReply(connection, std::move(encoded.value()));
}

void UcxAgent::replyUnsent(
    const transport::ConnectionPtr& connection,
    uint64_t callId,
    const base::Error& why) {
  const auto message = makeFailure(
      why.kind,
      "worker \"" + workerInfo_.name_ +
          "\" could not send its result: " + why.message);
  auto encoded = encode(
      message, {callId, wire::CallKind::kResponse, options_.inlineBytes});
  if (encoded.ok()) { // a text without tensors: always
    sendReply(connection, std::move(encoded.value()));
  }
}

void UcxAgent::sendReply(
    const transport::ConnectionPtr& connection,
    Encoded encoded) {
  if (encoded.bulk.empty() || !connection->sharesMemory() ||
      encoded.giveAway(*cache_, connection)) {
    sendReplyNow(connection, std::move(encoded));
    return;
  }
  trimLater();
  lender_.lend(std::move(encoded), [this, connection](Encoded lent) {
    sendReplyNow(connection, std::move(lent));
  });
}

void UcxAgent::sendReplyNow(
    const transport::ConnectionPtr& connection,
    Encoded encoded) {
  metrics::add(counters_.bytesSent, encoded.totalBytes);
  counters_.messageBytes.add(encoded.totalBytes);
  const bool borrows = encoded.borrows();
  Admission::Untaken untaken;
  if (!encoded.bulk.empty() && encoded.lent.empty() && !encoded.given) {
    untaken = admission_.answering(connection.get(), encoded.totalBytes);
  }
  base::Buffer head = std::move(encoded.head);
  std::vector<transport::BulkSpan> bulk = std::move(encoded.bulk);
  connection->send(
      std::move(head),
      std::move(bulk),
      [untaken = std::move(untaken),
       held = borrows ? std::make_shared<Encoded>(std::move(encoded))
                      : nullptr](const base::Error& error) {
        if (held != nullptr && held->parcel != nullptr) {
          held->parcel->sent(error);
        }
        // A response that its caller refuses or does not live to see is
        // nobody's loss here; the caller has its own error.
        if (error && held != nullptr) {
          held->discard();
        }
      });
}

} // namespace torch_rpc_ext::agent
