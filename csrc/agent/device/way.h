#pragma once

#include "agent/device/streams.h"
#include "base/error.h"
#include "wire/call_frame.h"

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_rpc_ext::agent::device {

// A storage on a device, on its way into a frame.
struct Departing {
  c10::Storage storage;
  wire::StorageEntry* entry = nullptr;
};

// Which message it is, among those of two workers.
struct MessageKey {
  uint64_t callId = 0;
  wire::CallKind kind = wire::CallKind::kRequest;

  bool operator==(const MessageKey&) const = default;
};

// A way to bring the bytes of device storages to another worker beside the
// frame. What no such way takes is staged (staging.h).
//
// Thread: any. Everything is queued on the current streams of the calling
// thread, and nothing waits for a device.
class BesideWay {
 public:
  virtual ~BesideWay() = default;

  // Takes those storages that it can, and sets StorageEntry::beside of each.
  // `parcel` is what must live until the receiver has them. May throw
  // c10::Error.
  virtual base::Error depart(
      const MessageKey& key,
      std::vector<Departing>& storages,
      std::shared_ptr<void>& parcel) = 0;

  // The storages that were taken, in their order, for the current streams.
  // Fails with kInvalid for a message that brought none.
  virtual base::Result<std::vector<c10::Storage>> arrive(
      const MessageKey& key) = 0;
};

} // namespace torch_rpc_ext::agent::device
