#pragma once

#include "agent/device/region.h"
#include "agent/device/streams.h"
#include "base/buffer.h"
#include "base/error.h"
#include "wire/call_frame.h"

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_rpc_ext::agent::device {

// What goes from a device into a frame, as a storage there.
struct Departing : Region {
  wire::StorageEntry* entry = nullptr;
  // The receiver looks at its bytes, on the host (indices of sparse tensors).
  bool isChecked = false;
};

// What must live until the receiver has what was taken. Dies without a word
// from sent() when its frame has never left.
class Parcel {
 public:
  virtual ~Parcel() = default;

  // What has become of the frame, once.
  virtual void sent(const base::Error& /*error*/) {}
};

// What a way makes of the storages that it takes.
struct Departure {
  std::shared_ptr<Parcel> parcel; // null if it takes none
  base::Buffer note; // for the frame
};

// What the receiver is to be told of what departs.
struct DepartOptions {
  bool checked = false; // checksums, where the way has some
};

// A storage that the frame says to travel beside it.
struct Expected {
  c10::Device device; // one of those that RPC uses here
  uint64_t size = 0; // as it travels
  wire::WireDtype dtype = wire::WireDtype::kFloat32;

  uint64_t sizeHere() const {
    return size * wire::widening(dtype);
  }
};

// What has come beside a frame.
struct Arrived {
  std::vector<c10::Storage> storages; // in the order of the frame
  // Checksums that are computed while that is copied: to be compared when what
  // is queued is over. Of one storage, or of a block of several.
  struct Sum {
    std::vector<uint32_t> storages; // numbers of them
    uint64_t bytes = 0;
    const uint64_t* here = nullptr;
    const uint64_t* sent = nullptr;
  };
  std::vector<Sum> sums;
  std::vector<c10::Storage> held; // where they are
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
class SendingWay {
 public:
  virtual ~SendingWay() = default;

  // Takes those storages that it can, and sets StorageEntry::beside of each and
  // clears `bulk`. They travel as the dtype of their entries, unless it changes
  // that. May throw c10::Error.
  virtual base::Error depart(
      const MessageKey& key,
      const DepartOptions& options,
      std::vector<Departing>& storages,
      Departure& departure) = 0;

  // It queues work on the receiver's devices, which are this process's.
  virtual bool writesOnTargets() const {
    return false;
  }
};

// The receiver's end of it.
// Thread: as SendingWay.
class ReceivingWay {
 public:
  virtual ~ReceivingWay() = default;

  // The storages that were taken, in the order of the frame, for the current
  // streams. Fails with kInvalid for a message that brought none, or others
  // than `expected`. May throw c10::Error.
  virtual base::Result<Arrived> arrive(
      const MessageKey& key,
      base::ConstSpan note,
      const std::vector<Expected>& expected) = 0;

  // What comes was made by this process: no need to look at its bytes.
  virtual bool isTrusted() const {
    return false;
  }
};

} // namespace torch_rpc_ext::agent::device
