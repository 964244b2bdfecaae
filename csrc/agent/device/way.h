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

// A region on a device that is sent, and its entry in the frame.
struct Departing : Region {
  wire::StorageEntry* entry = nullptr;
  // The receiver reads the bytes on its host, to check them, so they must come
  // there: indices of sparse tensors.
  bool isReadOnHost = false;
};

// Keeps alive what a way has taken, until the receiver has it. If the frame is
// never handed to the transport, the parcel dies without a call of sent().
class Parcel {
 public:
  virtual ~Parcel() = default;

  // The frame has been sent, or sending has failed. Called at most once.
  virtual void sent(const base::Error& /*error*/) {}
};

// What SendingWay::depart() returns for the storages that the way takes.
struct Departure {
  std::shared_ptr<Parcel> parcel; // null if the way takes no storage
  base::Buffer note; // for the frame
  // The frame must not leave before the work that depart() has queued is over.
  bool waits = false;
};

struct DepartOptions {
  bool checked = false; // send checksums, if the way can
};

// A storage that travels beside the frame, as the frame describes it.
struct Expected {
  c10::Device device; // a device that RPC uses in this process
  uint64_t size = 0; // on the wire
  wire::WireDtype dtype = wire::WireDtype::kFloat32;

  uint64_t sizeHere() const {
    return size * wire::widening(dtype);
  }
};

// What has arrived beside a frame.
struct Arrived {
  std::vector<c10::Storage> storages; // in the order of the frame
  // A checksum of one storage, or of a block of several. To be compared when
  // all queued work is over.
  struct Sum {
    std::vector<uint32_t> storages; // the storages' numbers
    uint64_t bytes = 0;
    const uint64_t* here = nullptr; // as computed in this process
    const uint64_t* sent = nullptr; // as computed by the sender
  };
  std::vector<Sum> sums;
  std::vector<c10::Storage> held; // the memory that contains the checksums
};

// Names a message among those between two workers.
struct MessageKey {
  uint64_t callId = 0;
  wire::CallKind kind = wire::CallKind::kRequest;

  bool operator==(const MessageKey&) const = default;
};

// The sender's end of a way that brings the bytes of device storages to another
// worker beside the frame. Storages that no such way takes are staged
// (staging.h).
//
// Thread: any. All work is queued on the current streams of the calling thread,
// and nothing waits for a device.
class SendingWay {
 public:
  virtual ~SendingWay() = default;

  // Takes the storages that it can take: sets `beside` of their entries and
  // clears `bulk`. They travel in the dtype of their entries; depart() may
  // change that dtype. May throw c10::Error.
  virtual base::Error depart(
      const MessageKey& key,
      const DepartOptions& options,
      std::vector<Departing>& storages,
      Departure& departure) = 0;

  // Whether depart() queues work on the receiver's devices, because these are
  // devices of this process.
  virtual bool writesOnTargets() const {
    return false;
  }
};

// The receiver's end of a SendingWay.
// Thread: as for SendingWay.
class ReceivingWay {
 public:
  virtual ~ReceivingWay() = default;

  // The storages that the sender's way took, for use on the current streams.
  // Fails with kInvalid if they are not those that `expected` describes. May
  // throw c10::Error.
  virtual base::Result<Arrived> arrive(
      const MessageKey& key,
      base::ConstSpan note,
      const std::vector<Expected>& expected) = 0;

  // Whether this process itself sent the bytes, so that they need no checks.
  virtual bool isTrusted() const {
    return false;
  }
};

} // namespace torch_rpc_ext::agent::device
