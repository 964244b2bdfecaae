#include "agent/device/streams.h"

#include "compat/stream_handle.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_rpc_ext::agent::device {

using c10::impl::VirtualGuardImpl;

c10::Stream currentStream(c10::Device device) {
  return VirtualGuardImpl(kType).getStream(device);
}

base::Result<cuda::StreamHandle> currentHandle(c10::Device device) {
  const auto handle = compat::nativeHandle(currentStream(device));
  if (!handle) {
    return base::Error(
        base::ErrorKind::kUnsupported,
        "this version of torch does not tell the handles of its streams");
  }
  return static_cast<cuda::StreamHandle>(*handle);
}

Streams poolStreams(DeviceList devices) {
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
    event.record(currentStream(stream.device()));
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
    event.block(currentStream(event.device()));
  }
}

} // namespace torch_rpc_ext::agent::device
