// UcxAgent, the receiving side: frames become requests that are served and
// responses that complete calls.

#include "agent/call_label.h"
#include "agent/rpc_error.h"
#include "agent/ucx_agent.h"
#include "base/log.h"
#include "compat/torch_compat.h"

#include <ATen/ThreadLocalState.h>

namespace torch_rpc_ext::agent {

namespace {

constexpr double kTrimsPerIdleTime = 3;

base::Timer::Clock::duration toDuration(double seconds) {
  return std::chrono::duration_cast<base::Timer::Clock::duration>(
      std::chrono::duration<double>(seconds));
}

} // namespace

struct UcxAgent::Arrival {
  transport::ConnectionPtr connection;
  std::unique_ptr<transport::Incoming> incoming;
  std::optional<Decoder> decoder;
  base::Error error; // of the bulk

  const wire::CallHeader& header() const {
    return decoder->header();
  }
};

// ---- transport::Handler ----------------------------------------------------

std::string UcxAgent::introduction() {
  return peers_.introduction();
}

base::Error UcxAgent::onAccept(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  return peers_.onAccept(connection, hello);
}

base::Error UcxAgent::onConnected(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  return peers_.onConnected(connection, hello);
}

void UcxAgent::onClosed(
    const transport::ConnectionPtr& connection,
    const base::Error& error) {
  const std::string name = peers_.nameOf(connection.get());
  const auto gone = peers_.onClosed(connection, error);
  base::log(
      base::LogLevel::kInfo,
      "the connection to worker \"" + name + "\" ended: " + error.message);
  for (auto& call : pending_.takeAll(connection.get())) {
    failLater(std::move(call), error);
  }
  if (gone) {
    barrier_.lose(
        *gone, {error.kind, "worker \"" + *gone + "\": " + error.message});
    release(*gone, connection->peerDied());
  }
}

void UcxAgent::release(const std::string& worker, bool died) {
  const auto id = membership_.idOf(worker);
  if (!id || stopped_.load()) {
    return;
  }
  // Sends to the others that took part; not for the thread that polls.
  executor_.submit(base::makeTask([this, id = *id, worker, died] {
    const size_t contexts = compat::releaseAutogradOf(id);
    // One that cannot be reached may come back, and use its RRefs.
    RRefs values;
    if (died) {
      values = compat::releaseRRefsOf(id);
    }
    if (contexts + values.size() != 0) {
      base::log(
          base::LogLevel::kInfo,
          "released " + std::to_string(contexts) +
              " distributed autograd contexts and " +
              std::to_string(values.size()) + " values of RRefs of worker \"" +
              worker + "\"");
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
  const Executor::Claim claim(response && awaitedHere(header.callId));
  if (arrival->incoming->bulkSizes().empty()) {
    auto none = arrival->decoder->allocate(*cache_, {});
    if (!none.ok()) {
      arrival->error = none.error();
    }
    dispatch(std::move(arrival));
    return;
  }
  // Mapping memory and copying are not for the thread that polls.
  executor_.submit(base::makeTask([this, arrival = std::move(arrival)] {
    fetchBulk(arrival);
  }));
}

void UcxAgent::fetchBulk(std::shared_ptr<Arrival> arrival) {
  auto* const incoming = arrival->incoming.get();
  auto spans = arrival->decoder->allocate(
      *cache_, incoming->bulkSizes(), [incoming](size_t index) {
        return incoming->adopt(index);
      });
  if (!spans.ok()) {
    incoming->refuse(spans.error());
    arrival->error = spans.error();
    dispatch(std::move(arrival));
    return;
  }
  trimLater();
  incoming->receive(
      std::move(spans.value()),
      [this, arrival = std::move(arrival)](const base::Error& error) {
        arrival->error = error;
        dispatch(arrival);
      });
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
  trimming_.store(false);
  const auto stats = cache_->stats();
  if (more || stats.idleBlocks + stats.usedBlocks != 0) {
    trimLater();
  }
}

void UcxAgent::dispatch(std::shared_ptr<Arrival> arrival) {
  if (arrival->header().kind == wire::CallKind::kResponse) {
    // Taken here and not by the completion: what has arrived stays arrived,
    // also when the peer closes the connection in the next moment.
    auto call = pending_.take(arrival->header().callId);
    if (!call) {
      return; // timed out meanwhile
    }
    executor_.submitCompletion(
        base::makeTask([this,
                        arrival = std::move(arrival),
                        call = std::move(*call)]() mutable {
          complete(*arrival, std::move(call));
        }));
  } else if (arrival->header().messageType == kBarrierRequestType) {
    // Never waits for a free thread: it is what ends the group.
    executor_.submit(base::makeTask([this, arrival = std::move(arrival)] {
      auto message = arrival->decoder->finish();
      if (message.ok()) {
        serveBarrier(
            arrival->connection, arrival->header().callId, *message.value());
      }
    }));
  } else {
    executor_.submitRequest(
        base::makeTask(
            [this, arrival = std::move(arrival)] { serve(*arrival); }));
  }
}

// ---- responses -------------------------------------------------------------

void UcxAgent::complete(Arrival& arrival, PendingCall call) {
  if (arrival.error) {
    fail(std::move(call), arrival.error);
    return;
  }
  auto message = arrival.decoder->finish();
  if (!message.ok()) {
    fail(std::move(call), message.error());
    return;
  }
  arrival.incoming.reset();
  finish(std::move(call), std::move(message.value()));
}

// ---- requests --------------------------------------------------------------

void UcxAgent::serve(Arrival& arrival) {
  const uint64_t id = arrival.header().callId;
  const transport::ConnectionPtr connection = arrival.connection;
  auto message = arrival.error
      ? base::Result<c10::intrusive_ptr<rpc::Message>>(arrival.error)
      : arrival.decoder->finish();
  if (!message.ok()) {
    reply(
        connection,
        id,
        rpc::createExceptionResponse(
            "worker \"" + workerInfo_.name_ +
                "\" could not take the message: " + message.error().message,
            static_cast<int64_t>(id)));
    return;
  }
  arrival.incoming.reset();
  arrival.decoder.reset();
  metrics::add(counters_.callsServed, 1);
  counters_.serverActiveCalls.fetch_add(1);

  c10::intrusive_ptr<rpc::JitFuture> future;
  {
    const RunningRequests::Entry entry(
        runningRequests_, labelOf(*message.value()));
    future = execute(std::move(message.value()));
  }
  if (future->completed()) {
    counters_.serverActiveCalls.fetch_sub(1);
    auto response = responseOf(*future, id);
    // Before the answer is sent: nobody else may refer to its tensors when
    // their memory is given away.
    future.reset();
    reply(connection, id, std::move(response));
    return;
  }
  counters_.serverActiveAsyncCalls.fetch_add(1);
  future->addCallback([this, connection, id](rpc::JitFuture& done) {
    counters_.serverActiveCalls.fetch_sub(1);
    counters_.serverActiveAsyncCalls.fetch_sub(1);
    reply(connection, id, responseOf(done, id));
  });
}

c10::intrusive_ptr<rpc::JitFuture> UcxAgent::execute(
    c10::intrusive_ptr<rpc::Message> request) {
  try {
    // torch leaves its profiler's state behind on a thread that served a
    // profiled request, which then records no other: give it one to spoil.
    std::optional<at::ThreadLocalStateGuard> guard;
    if (request->type() == rpc::MessageType::RUN_WITH_PROFILING_REQ) {
      guard.emplace(at::ThreadLocalState());
    }
    return (*cb_)(*request, {});
  } catch (const std::exception& error) {
    auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    future->setError(std::make_exception_ptr(std::runtime_error(error.what())));
    return future;
  }
}

c10::intrusive_ptr<rpc::Message> UcxAgent::responseOf(
    rpc::JitFuture& future,
    uint64_t callId) {
  return future.hasError()
      ? rpc::createExceptionResponse(
            future.tryRetrieveErrorMessage(), static_cast<int64_t>(callId))
      : future.value().toCustomClass<rpc::Message>();
}

void UcxAgent::reply(
    const transport::ConnectionPtr& connection,
    uint64_t callId,
    c10::intrusive_ptr<rpc::Message> message) {
  auto encoded =
      encode(message, callId, wire::CallKind::kResponse, options_.inlineBytes);
  if (!encoded.ok()) {
    message = rpc::createExceptionResponse(
        "worker \"" + workerInfo_.name_ +
            "\" could not send its result: " + encoded.error().message,
        static_cast<int64_t>(callId));
    encoded = encode(
        message, callId, wire::CallKind::kResponse, options_.inlineBytes);
    if (!encoded.ok()) {
      return; // a text without tensors: cannot happen
    }
  }
  message.reset();
  const bool given = encoded.value().giveAway(*cache_);
  metrics::add(counters_.bytesSent, encoded.value().totalBytes);
  base::Buffer head = std::move(encoded.value().head);
  std::vector<transport::BulkSpan> bulk = std::move(encoded.value().bulk);
  const bool borrowed = !bulk.empty();
  connection->send(
      std::move(head),
      std::move(bulk),
      [given,
       held = borrowed ? std::make_shared<Encoded>(std::move(encoded.value()))
                       : nullptr](const base::Error& error) {
        // A response that its caller refuses or does not live to see is
        // nobody's loss here; the caller has its own error.
        if (error && given) {
          held->discard();
        }
      });
}

} // namespace torch_rpc_ext::agent
