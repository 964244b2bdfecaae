// Encoding and decoding of messages with tensors on devices.

#include "agent/devices.h"

#include "agent/message_types.h"
#include "agent/thread_state.h"
#include "base/boundary.h"
#include "base/log.h"

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

namespace {

// How many messages may be copied to devices at a time while the rest of their
// bulk arrives. More would take device memory that running functions need.
constexpr int kMaxLandings = 4;

// Adds the receiver's devices on which the tensors beside the frame will be
// written.
void addTargets(const device::Route& route, std::vector<c10::Device>& devices) {
  const size_t sources = devices.size();
  for (size_t i = 0; i < sources; ++i) {
    auto place = route.placeOf(devices[i]);
    const c10::Device target =
        device::deviceAt(place.ok() ? place.value() : wire::kHostPlace);
    if (!target.is_cpu() &&
        std::find(devices.begin(), devices.end(), target) == devices.end()) {
      devices.push_back(target);
    }
  }
}

} // namespace

Devices::Devices(
    bool usesCudaIpc,
    cuda::PtxSource kernels,
    base::TaskRunner& runner,
    ReceiveMemory& memory,
    const Peers& peers)
    : runner_(runner),
      memory_(memory),
      peers_(peers),
      ipc_(std::make_shared<device::Ipc>(usesCudaIpc, ipcLinks())) {
  launcher_.setSource(std::move(kernels));
}

std::shared_ptr<device::SendingWay> Devices::wayTo(
    const transport::ConnectionPtr& connection) {
  if (connection->distance() == transport::Distance::kSameProcess) {
    return {std::shared_ptr<void>(), &sameProcess_};
  }
  const auto peer = peers_.lifeOf(connection.get());
  return peer ? ipc_->to(connection, *peer, tables_.devices()) : nullptr;
}

std::shared_ptr<device::ReceivingWay> Devices::wayFrom(
    const transport::ConnectionPtr& connection,
    base::ConstSpan note) {
  if (connection->distance() == transport::Distance::kSameProcess) {
    return {std::shared_ptr<void>(), &sameProcess_};
  }
  const auto peer = peers_.lifeOf(connection.get());
  return peer ? ipc_->from(connection, *peer, note) : nullptr;
}

// ---- CUDA IPC --------------------------------------------------------------

device::Ipc::Links Devices::ipcLinks() {
  return {
      .tell =
          [this](
              const transport::ConnectionPtr& connection,
              device::IpcMessage kind,
              std::vector<char> payload) {
            tellOfIpc(connection, kind, std::move(payload));
          },
      .run =
          [this](std::function<void()> task) {
            runner_.submit(base::makeTask(std::move(task)));
          },
      .events = &events_,
      .launcher = &launcher_,
      .hasDevices = [this] { return !tables_.devices().empty(); }};
}

void Devices::tellOfIpc(
    const transport::ConnectionPtr& connection,
    device::IpcMessage kind,
    std::vector<char> payload) {
  const auto type = static_cast<uint16_t>(kIpcType + static_cast<int>(kind));
  auto encoded = agent::encode(
      c10::make_intrusive<rpc::Message>(
          std::move(payload),
          std::vector<at::Tensor>{},
          static_cast<rpc::MessageType>(type)),
      {0, wire::CallKind::kRequest, UINT64_MAX});
  if (encoded.ok()) { // always, because the message has no tensors
    // If the peer is gone, onClosed() does what follows.
    connection->send(
        std::move(encoded.value().head), {}, [](const base::Error&) {});
  }
}

void Devices::serveIpc(Arrival& arrival) {
  const auto peer = peers_.lifeOf(arrival.connection.get());
  auto message = arrival.decoder->finish();
  if (!peer || arrival.error || !message.ok()) {
    return;
  }
  const auto kind =
      static_cast<device::IpcMessage>(arrival.header().messageType - kIpcType);
  const auto& payload = message.value()->payload();
  if (const auto error = ipc_->onMessage(
          arrival.connection, *peer, kind, {payload.data(), payload.size()})) {
    base::log(
        base::LogLevel::kWarning,
        "closing the connection to worker \"" + peer->name +
            "\": " + error.message);
    arrival.connection->lose(error);
  }
  if (kind == device::IpcMessage::kOffer) {
    memory_.trimLater(); // closes what was opened for the trial copies
  }
}

bool Devices::trim(std::chrono::steady_clock::duration idle) {
  if (ipc_->stats().open == 0) {
    return false;
  }
  // Closing a handle may take long.
  runner_.submit(base::makeTask([ipc = ipc_, idle] { ipc->trim(idle); }));
  return true;
}

void Devices::stop(std::chrono::milliseconds patience) {
  events_.stop();
  ipc_->waitUntilReleased(std::chrono::steady_clock::now() + patience);
  ipc_->stop();
}

void Devices::addTo(Metrics& metrics) const {
  const auto ipc = ipc_->stats();
  metrics["agent.cuda_ipc_sent_bytes"] = std::to_string(ipc.bytesSent);
  metrics["agent.cuda_ipc_received_bytes"] = std::to_string(ipc.bytesReceived);
  metrics["agent.cuda_ipc_held_messages"] = std::to_string(ipc.held);
  metrics["agent.cuda_ipc_open_allocations"] = std::to_string(ipc.open);
}

// ---- messages --------------------------------------------------------------

transport::Incoming::Arrived Devices::landEarly(Arrival& arrival) {
  if (!arrival.decoder->hasDevices() ||
      arrival.connection->distance() != transport::Distance::kApart ||
      landings_->load() >= kMaxLandings) {
    return nullptr;
  }
  arrival.streams = device::poolStreams(tables_.devices());
  auto landing = std::make_shared<device::Landing>(arrival.streams, landings_);
  arrival.decoder->landOn(landing);
  if (landing->empty()) {
    return nullptr;
  }
  return [landing](base::MutableSpan part) { landing->arrived(part); };
}

base::Result<c10::intrusive_ptr<rpc::Message>> Devices::decodeNow(
    Arrival& arrival) {
  if (arrival.error) {
    return arrival.error;
  }
  // This thread may be a user's, which leads, with modes of the user set.
  const OrdinaryTensors ordinary;
  if (!arrival.decoder->hasDevices()) {
    return arrival.decoder->finish();
  }
  if (arrival.beside != nullptr) {
    memory_.trimLater();
  }
  const device::StreamScope scope(arrival.streams);
  return arrival.decoder->finish(arrival.beside.get(), &launcher_);
}

bool Devices::decode(const ArrivalPtr& arrival, std::function<void()> again) {
  if (arrival->message) {
    return true;
  }
  if (arrival->streams.empty() &&
      (arrival->decoder->hasDevices() ||
       arrival->header().kind == wire::CallKind::kRequest)) {
    arrival->streams = device::poolStreams(tables_.devices());
  }
  // The sender may write to its tensors once the call is over, and nothing
  // orders its devices after the copies from its memory: so nobody gets the
  // message before they are over.
  const bool fromSender =
      arrival->beside != nullptr && !arrival->beside->isTrusted();
  arrival->message = decodeNow(*arrival);
  auto sums = arrival->decoder->takePendingSums();
  if (!arrival->message->ok()) {
    return true;
  }
  arrival->incoming.reset();
  arrival->beside.reset();
  if (sums.empty() && !fromSender) {
    return true;
  }
  device::Events events;
  try {
    events = device::record(arrival->streams);
  } catch (const c10::Error& error) {
    arrival->message =
        base::Error(base::ErrorKind::kSystem, error.what_without_backtrace());
    return true;
  }
  if (sums.empty() && device::EventWaiter::completeSoon(events)) {
    return true;
  }
  events_.whenComplete(
      std::move(events),
      [arrival,
       sums = std::make_shared<PendingSums>(std::move(sums)),
       again = std::move(again)](const base::Error& error) {
        if (const base::Error wrong = error ? error : sums->compare()) {
          arrival->message = wrong;
        }
        again();
      });
  return false;
}

base::Error Devices::encode(
    const c10::intrusive_ptr<rpc::Message>& message,
    const EncodeOptions& options,
    const device::Route& route,
    const transport::ConnectionPtr& connection,
    Ready ready) {
  const auto way = wayTo(connection);
  auto* const beside = way.get();
  auto encoder = std::make_shared<Encoder>(message, options, route);
  // The copies run after the work that is already queued. Work that the user
  // queues next need not wait for them, because the frame does; except in a
  // call to oneself, whose frame leaves at once.
  auto devices = device::devicesOf(message->tensors());
  const bool toSelf = beside != nullptr && beside->writesOnTargets();
  if (toSelf) {
    addTargets(route, devices);
  }
  const auto streams = device::poolStreams(devices);
  device::followCurrent(streams);
  bool waits = false;
  device::Events events;
  {
    const device::StreamScope scope(streams);
    if (auto error = encoder->describe()) {
      return error;
    }
    auto departed = encoder->depart(beside, &launcher_);
    if (!departed.ok()) {
      return departed.error();
    }
    waits = departed.value();
    if ((waits && encoder->filling() == nullptr) || toSelf) {
      events = device::record(streams);
    }
  }
  if (toSelf) {
    device::blockCurrent(events);
  }
  if (!waits) {
    ready(encoder->finish());
    return {};
  }
  auto goOn = [encoder, ready = std::move(ready)](const base::Error& error) {
    base::guarded(
        base::Boundary::kDeviceEvent,
        [&] {
          ready(error ? base::Result<Encoded>(error) : encoder->finish());
        },
        [&](const base::Error& thrown) { ready(thrown); });
  };
  if (const auto filling = encoder->filling()) {
    // The frame leaves after the first piece: a failed device mostly shows
    // there, and then no frame has to be taken back.
    filling->whenFilled(filling->firstBytes(), std::move(goOn));
    filling->start(events_);
  } else {
    events_.whenComplete(std::move(events), std::move(goOn));
  }
  return {};
}

} // namespace torch_rpc_ext::agent
