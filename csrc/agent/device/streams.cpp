#include "agent/device/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_rpc_ext::agent::device {

using c10::impl::VirtualGuardImpl;

Streams poolStreams(Devices devices) {
  Streams streams;
  if (devices.empty()) {
    return streams;
  }
  const VirtualGuardImpl impl(kType);
  streams.reserve(devices.size());
  for (const c10::Device& device : devices) {
    streams.push_back(impl.getStreamFromGlobalPool(device));
  }
  return streams;
}

void followCurrent(const Streams& streams) {
  for (const c10::Stream& stream : streams) {
    c10::Event event(kType);
    event.record(VirtualGuardImpl(kType).getStream(stream.device()));
    event.block(stream);
  }
}

Events record(const Streams& streams) {
  Events events;
  events.reserve(streams.size());
  for (const c10::Stream& stream : streams) {
    events.emplace_back(kType);
    events.back().record(stream);
  }
  return events;
}

void blockCurrent(const Events& events) {
  for (const c10::Event& event : events) {
    event.block(VirtualGuardImpl(kType).getStream(event.device()));
  }
}

} // namespace torch_rpc_ext::agent::device
