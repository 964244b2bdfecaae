#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <vector>

namespace torch_rpc_ext::agent::device {

// The kind of devices that device maps name, as upstream's.
inline constexpr c10::DeviceType kType = c10::kCUDA;

using Devices = c10::ArrayRef<c10::Device>;
using Streams = std::vector<c10::Stream>;
using Events = std::vector<c10::Event>;

// One stream for each device, from torch's pool.
Streams poolStreams(Devices devices);

// Makes each wait for what is queued on the current stream of its device.
void followCurrent(const Streams& streams);

// What marks the end of what is queued now.
Events record(const Streams& streams);

// Makes the current streams wait.
void blockCurrent(const Events& events);

// While it lives these streams are this thread's current ones.
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
