#pragma once

#include "base/error.h"
#include "cuda/driver_api.h"

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Besides the CPU, device maps name only devices of this kind, here and
// upstream.
inline constexpr c10::DeviceType kType = c10::kCUDA;

using DeviceList = c10::ArrayRef<c10::Device>;
using Streams = std::vector<c10::Stream>;
using Events = std::vector<c10::Event>;

// The calling thread's current stream of a device.
c10::Stream currentStream(c10::Device device);
// The driver's handle of that stream. Fails with kUnsupported where torch does
// not tell it.
base::Result<cuda::StreamHandle> currentHandle(c10::Device device);

// One stream for each device, from torch's pool.
Streams poolStreams(DeviceList devices);

// Makes each stream wait for the work queued on the current stream of its
// device.
void followCurrent(const Streams& streams);

// Events that complete when the work queued so far on the streams is over.
Events record(const Streams& streams);

// Makes the current stream of each event's device wait for the event.
void blockCurrent(const Events& events);

// While this lives, these streams are the thread's current streams.
// Thread: the one that made it.
class StreamScope {
 public:
  explicit StreamScope(const Streams& streams) {
    if (!streams.empty()) {
      guard_.emplace(streams);
    }
  }

 private:
  std::optional<c10::MultiStreamGuard> guard_;
};

} // namespace torch_rpc_ext::agent::device
