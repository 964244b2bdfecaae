// UcxAgent and tensors of devices: what a call with one does differently, on
// its way out and on its way in.

#include "agent/arrival.h"
#include "agent/ucx_agent.h"

#include <algorithm>

namespace torch_rpc_ext::agent {

namespace {

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

device::BesideWay* UcxAgent::besideOf(
    const transport::ConnectionPtr& connection) {
  return connection->loopsBack() ? &sameProcess_ : nullptr;
}

base::Result<c10::intrusive_ptr<rpc::Message>> UcxAgent::decode(
    Arrival& arrival,
    const device::Streams& streams) {
  if (!arrival.decoder->hasDevices()) {
    return arrival.decoder->finish();
  }
  const device::StreamScope scope(streams);
  return arrival.decoder->finish(besideOf(arrival.connection), &launcher_);
}

base::Error UcxAgent::encodeFromDevices(
    const c10::intrusive_ptr<rpc::Message>& message,
    const EncodeOptions& options,
    const device::Route& route,
    device::BesideWay* beside,
    Ready ready) {
  auto encoder = std::make_shared<Encoder>(message, options, route);
  // After what is queued already; what the user queues next need not wait for
  // the copies.
  auto devices = device::devicesOf(message->tensors());
  if (beside != nullptr) {
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
    if (waits) {
      events = device::record(streams);
    }
  }
  if (!waits) {
    ready(encoder->finish());
    return {};
  }
  deviceEvents_.whenComplete(
      std::move(events),
      [encoder = std::move(encoder),
       ready = std::move(ready)](const base::Error& error) {
        ready(error ? base::Result<Encoded>(error) : encoder->finish());
      });
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
      besideOf(connection),
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
      besideOf(connection),
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
