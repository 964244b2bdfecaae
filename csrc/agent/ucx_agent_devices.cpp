// UcxAgent and tensors of devices: what a call with one does differently, on
// its way out and on its way in.

#include "agent/arrival.h"
#include "agent/thread_state.h"
#include "agent/ucx_agent.h"
#include "base/boundary.h"
#include "base/log.h"

#include <algorithm>

namespace torch_rpc_ext::agent {

namespace {

// More messages would take the memory of functions that are being served.
constexpr int kMaxLandings = 4;

// What comes beside the frame is written on the receiver's devices.
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

std::shared_ptr<device::SendingWay> UcxAgent::wayTo(
    const transport::ConnectionPtr& connection) {
  if (connection->loopsBack()) {
    return {std::shared_ptr<void>(), &sameProcess_};
  }
  const auto peer = peers_.lifeOf(connection.get());
  return peer ? ipc_->to(connection, *peer, devices_.devices()) : nullptr;
}

std::shared_ptr<device::ReceivingWay> UcxAgent::wayFrom(
    const transport::ConnectionPtr& connection,
    base::ConstSpan note) {
  if (connection->loopsBack()) {
    return {std::shared_ptr<void>(), &sameProcess_};
  }
  const auto peer = peers_.lifeOf(connection.get());
  return peer ? ipc_->from(connection, *peer, note) : nullptr;
}

// ---- CUDA IPC --------------------------------------------------------------

device::Ipc::Links UcxAgent::ipcLinks() {
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
            executor_.submit(base::makeTask(std::move(task)));
          },
      .events = &deviceEvents_,
      .launcher = &launcher_,
      .hasDevices = [this] { return !devices_.devices().empty(); }};
}

void UcxAgent::tellOfIpc(
    const transport::ConnectionPtr& connection,
    device::IpcMessage kind,
    std::vector<char> payload) {
  const auto type = static_cast<uint16_t>(kIpcType + static_cast<int>(kind));
  auto encoded = encode(
      c10::make_intrusive<rpc::Message>(
          std::move(payload),
          std::vector<at::Tensor>{},
          static_cast<rpc::MessageType>(type)),
      {0, wire::CallKind::kRequest, UINT64_MAX});
  if (encoded.ok()) { // bytes without tensors: always
    // A peer that is not there to hear it: onClosed() sees to the rest.
    connection->send(
        std::move(encoded.value().head), {}, [](const base::Error&) {});
  }
}

void UcxAgent::serveIpc(Arrival& arrival) {
  const auto peer = peers_.lifeOf(arrival.connection.get());
  auto message = arrival.decoder->finish();
  if (!peer || !message.ok()) {
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
    arrival.connection->close();
  }
  if (kind == device::IpcMessage::kOffer) {
    trimLater(); // what was opened for its trials
  }
}

// ---- calls -----------------------------------------------------------------

transport::Incoming::Arrived UcxAgent::landEarly(Arrival& arrival) {
  if (!arrival.decoder->hasDevices() || !arrival.connection->sendsPieces() ||
      landings_->load() >= kMaxLandings) {
    return nullptr;
  }
  arrival.streams = device::poolStreams(devices_.devices());
  auto landing = std::make_shared<device::Landing>(arrival.streams, landings_);
  arrival.decoder->landOn(landing);
  if (landing->empty()) {
    return nullptr;
  }
  return [landing](base::MutableSpan part) { landing->arrived(part); };
}

base::Result<c10::intrusive_ptr<rpc::Message>> UcxAgent::decode(
    Arrival& arrival) {
  if (arrival.error) {
    return arrival.error;
  }
  // This thread may be the caller's, which leads.
  const OrdinaryTensors ordinary;
  if (!arrival.decoder->hasDevices()) {
    return arrival.decoder->finish();
  }
  if (arrival.beside != nullptr) {
    trimLater();
  }
  const device::StreamScope scope(arrival.streams);
  return arrival.decoder->finish(arrival.beside.get(), &launcher_);
}

bool UcxAgent::decoded(
    const std::shared_ptr<Arrival>& arrival,
    std::function<void()> again) {
  if (arrival->message) {
    return true;
  }
  if (arrival->streams.empty() &&
      (arrival->decoder->hasDevices() ||
       arrival->header().kind == wire::CallKind::kRequest)) {
    arrival->streams = device::poolStreams(devices_.devices());
  }
  arrival->message = decode(*arrival);
  auto sums = arrival->decoder->takePendingSums();
  if (!arrival->message->ok()) {
    return true;
  }
  arrival->incoming.reset();
  arrival->beside.reset();
  if (sums.empty()) {
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
  deviceEvents_.whenComplete(
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

base::Error UcxAgent::encodeFromDevices(
    const c10::intrusive_ptr<rpc::Message>& message,
    const EncodeOptions& options,
    const device::Route& route,
    device::SendingWay* beside,
    Ready ready) {
  auto encoder = std::make_shared<Encoder>(message, options, route);
  // After what is queued already; what the user queues next need not wait for
  // the copies.
  auto devices = device::devicesOf(message->tensors());
  if (beside != nullptr && beside->writesOnTargets()) {
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
    if (waits && encoder->filling() == nullptr) {
      events = device::record(streams);
    }
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
    // Not before: a device that has failed is mostly found out here, and then
    // there is no frame that would have to be taken back.
    filling->whenFilled(filling->firstBytes(), std::move(goOn));
    filling->start(deviceEvents_);
  } else {
    deviceEvents_.whenComplete(std::move(events), std::move(goOn));
  }
  return {};
}

base::Error UcxAgent::sendFromDevices(
    const EncodeOptions& options,
    const c10::intrusive_ptr<rpc::Message>& message,
    const device::Route& route,
    const transport::ConnectionPtr& connection) {
  return encodeFromDevices(
      message,
      options,
      route,
      wayTo(connection).get(),
      [this, callId = options.callId, connection](
          base::Result<Encoded> encoded) {
        if (!encoded.ok()) {
          if (auto call = pending_.take(callId)) {
            failLater(std::move(*call), encoded.error());
          }
        } else if (pending_.contains(callId)) { // else it has timed out
          sendCall(callId, std::move(encoded.value()), connection);
        }
      });
}

void UcxAgent::replyFromDevices(
    const transport::ConnectionPtr& connection,
    const EncodeOptions& options,
    const c10::intrusive_ptr<rpc::Message>& message,
    const device::Route& route) {
  const base::Error error = encodeFromDevices(
      message,
      options,
      route,
      wayTo(connection).get(),
      [this, callId = options.callId, connection](
          base::Result<Encoded> encoded) {
        if (encoded.ok()) {
          sendReply(connection, std::move(encoded.value()));
        } else {
          replyUnsent(connection, callId, encoded.error());
        }
      });
  if (error) {
    replyUnsent(connection, options.callId, error);
  }
}

} // namespace torch_rpc_ext::agent
