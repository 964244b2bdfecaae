// Receives messages: from the frame to the complete message.

#include "agent/receiver.h"

#include "agent/host_storage.h"
#include "agent/message_types.h"
#include "base/boundary.h"
#include "base/log.h"

#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

Receiver::Receiver(
    base::TaskRunner& runner,
    metrics::Counters& counters,
    ReceiveMemory& memory,
    Group& group,
    Devices& devices,
    Caller& caller,
    Server& server,
    GroupShutdown& shutdown)
    : runner_(runner),
      counters_(counters),
      memory_(memory),
      group_(group),
      devices_(devices),
      caller_(caller),
      server_(server),
      shutdown_(shutdown) {}

void Receiver::onFrame(
    const transport::ConnectionPtr& connection,
    std::unique_ptr<transport::Incoming> incoming) {
  auto decoder = Decoder::parse(incoming->head());
  if (!decoder.ok()) {
    // No call can work with a peer that sends such frames: to close the
    // connection gives both sides an error instead of a time-out.
    base::log(
        base::LogLevel::kWarning,
        "closing the connection to worker \"" +
            group_.peers().nameOf(connection.get()) +
            "\": " + decoder.error().message);
    incoming->refuse(decoder.error());
    connection->lose(decoder.error());
    return;
  }
  auto arrival = std::make_shared<Arrival>();
  arrival->connection = connection;
  arrival->incoming = std::move(incoming);
  arrival->decoder.emplace(std::move(decoder.value()));
  if (arrival->decoder->hasBeside()) {
    arrival->beside = devices_.wayFrom(connection, arrival->decoder->note());
  }
  uint64_t bytes = arrival->incoming->head().size;
  for (const uint64_t size : arrival->incoming->bulkSizes()) {
    bytes += size;
  }
  metrics::add(counters_.bytesReceived, bytes);
  const wire::CallHeader& header = arrival->header();
  const bool response = header.kind == wire::CallKind::kResponse;
  if (response && !caller_.expects(header.callId) && !arrival->mayPassRRefs()) {
    caller_.hearWhetherRead(header);
    return; // the call has ended, by its time-out: nobody wants the bulk
  }
  if (header.timeout != 0) {
    arrival->deadline =
        PendingCall::Clock::now() + std::chrono::milliseconds(header.timeout);
  }
  if (!response && !server_.announced(*arrival)) {
    return; // announced() has refused it
  }
  const Executor::Claim claim(
      response ? caller_.claims(header.callId, arrival->isPlainAnswer())
               : Executor::Claims::kNothing);
  if (arrival->incoming->bulkSizes().empty()) {
    auto none =
        arrival->decoder->allocate(*memory_.cache(), {}, devices_.used());
    if (!none.ok()) {
      arrival->error = none.error();
    }
    dispatch(std::move(arrival));
    return;
  }
  // The thread that polls must not map memory or copy: a task does.
  const uint64_t toCopy = response ? 0 : arrival->incoming->bytesToCopy();
  if (toCopy != 0) {
    fetchWhenAdmitted(std::move(arrival), toCopy);
    return;
  }
  const auto mailbox = response ? caller_.mailboxOf(header.callId) : nullptr;
  base::TaskPtr fetch = base::makeTask(
      [this, arrival = std::move(arrival)] { fetchBulk(arrival); });
  if (mailbox == nullptr || !mailbox->put(fetch)) {
    runner_.submit(std::move(fetch));
  }
}

void Receiver::fetchWhenAdmitted(ArrivalPtr arrival, uint64_t bytes) {
  const auto* const caller = arrival->connection.get();
  memory_.admission().request(
      caller,
      bytes,
      [this, arrival = std::move(arrival)](Admission::Room room) {
        arrival->room = std::move(room);
        runner_.submit(base::makeTask([this, arrival] { fetchBulk(arrival); }));
      });
}

void Receiver::fetchBulk(ArrivalPtr arrival) {
  if (arrival->isForNobody()) {
    server_.notBegun(*arrival);
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
            *memory_.cache(),
            incoming->bulkSizes(),
            devices_.used(),
            [&](size_t index, size_t size) {
              auto memory = incoming->map(index);
              if (memory != nullptr && !memory->isForeign()) {
                memory_.cache()->gotBack(*memory); // this process had lent it
              }
              return memory == nullptr
                  ? c10::Storage()
                  : adoptMemory(std::move(memory), arrival->connection, size);
            });
        if (!spans.ok()) {
          arrival->error = spans.error();
          return;
        }
        memory_.trimLater();
        arrived = devices_.landEarly(*arrival);
        into = std::move(spans.value());
        if (arrival->isRequest()) {
          uint64_t copied = 0;
          for (const auto& span : into) {
            copied += span.data == nullptr ? 0 : span.size;
          }
          memory_.admission().grow(
              arrival->room, arrival->connection.get(), copied);
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

void Receiver::dispatch(ArrivalPtr arrival) {
  if (!arrival->isRequest()) {
    caller_.answered(std::move(arrival));
    return;
  }
  const uint16_t type = arrival->header().messageType;
  if (type == kBarrierRequestType) {
    // As an internal task, so that shutdown does not wait behind requests.
    runner_.submit(base::makeTask([this, arrival = std::move(arrival)] {
      shutdown_.serve(*arrival);
    }));
  } else if (isIpcType(type)) {
    runner_.submit(base::makeTask([this, arrival = std::move(arrival)] {
      devices_.serveIpc(*arrival);
    }));
  } else {
    server_.arrived(std::move(arrival));
  }
}

std::map<std::string, Admission::Load> Receiver::waitingCallers() const {
  std::map<std::string, Admission::Load> waiting;
  for (const auto& [caller, load] : memory_.admission().byCaller()) {
    if (load.waitingRequests != 0) {
      waiting[group_.peers().nameOf(caller)] = load;
    }
  }
  return waiting;
}

} // namespace torch_rpc_ext::agent
