#pragma once

#include "agent/device/landing.h"
#include "agent/device/staging.h"
#include "agent/device/tables.h"
#include "agent/device/way.h"
#include "agent/integrity.h"
#include "agent/tensor_encoder.h"
#include "base/buffer.h"
#include "base/error.h"
#include "memory/buffer_cache.h"
#include "transport/transport.h"
#include "wire/call_frame.h"

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/rpc/message.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

// Turns torch's rpc::Message into a call frame (wire/call_frame.h) and back.
// These tensors can be sent: on the CPU and on CUDA devices, strided tensors of
// every dtype and sparse tensors (COO, CSR, CSC, BSR, BSC); on the CPU also
// affinely quantised tensors; on the meta device strided tensors, of which only
// the description travels. Sparse and quantised tensors travel as the strided
// tensors they consist of, and not through torch's jit pickler: its Unpickler
// believes the sizes and indices that it reads, so it reads and allocates out
// of bounds when a peer lies.

namespace torch_rpc_ext::agent {

// A message, ready for transport::Connection::send().
struct Encoded {
  base::Buffer head;
  std::vector<transport::BulkSpan> bulk;
  // Bytes of head and bulk.
  uint64_t totalBytes = 0;
  // What `bulk` points into: to be held until send()'s callback has fired.
  std::vector<c10::Storage> storages;
  c10::intrusive_ptr<torch::distributed::rpc::Message> message;
  // Whether all of the bulk is storages for the receiver's CPU, so that the
  // receiver could map it.
  bool mappable = false;
  // Whether the message may hold RRefs.
  bool holdsRRefs = true;
  // What travels beside the frame (device/way.h). Whoever sends the frame holds
  // the parcel until send()'s callback has fired, and tells the parcel then
  // whether the frame was taken.
  std::shared_ptr<device::Parcel> parcel;

  // Whether anything must be held until send()'s callback has fired.
  bool borrows() const {
    return !bulk.empty() || parcel != nullptr;
  }
  // Whether the receiver has to copy the bulk out of this process's memory
  // before that callback. Either all of the bulk lies in shared memory, or none
  // of it.
  bool borrowsBulk() const {
    return !bulk.empty() && bulk.front().map == nullptr;
  }
  // Gives the memory of the bulk away, so that the receiver may keep it and
  // write to it. Returns whether this was possible: if all of the memory is in
  // receive buffers or came mapped over `to`, and nobody else refers to it. To
  // be called when the message itself is gone. Where only shared memory was
  // missing, tells `cache` to make further buffers of that size in shared
  // memory.
  bool giveAway(memory::BufferCache& cache, const transport::ConnectionPtr& to);
};

// What a frame is made from.
struct EncodeOptions {
  uint64_t callId = 0;
  wire::CallKind kind = wire::CallKind::kRequest;
  // Storages, and the payload, of up to so many bytes are copied into the head,
  // larger ones go as bulk.
  uint64_t inlineThreshold = 16 << 10;
  // The dtype as which storages of float32 tensors travel.
  wire::WireDtype dtype = wire::WireDtype::kFloat32;
  // Of a request: the dtype that the caller wants for the answer's storages;
  // nothing if the callee chooses.
  std::optional<wire::WireDtype> answer = std::nullopt;
  // Of a request: ms for which the caller still waits; 0 without limit.
  uint32_t timeout = 0;
  bool checked = false; // with checksums
  // Bulk from devices may leave while the rest is copied (device/staging.h).
  bool inPieces = false;
  // Memory for narrowed copies; null for memory of torch's allocator.
  memory::BufferCache* cache = nullptr;
};

// Turns a message into a frame. Views of one storage share it, but a tensor
// that is small beside its storage travels as a copy of its own (the rule is
// that of torch's cloneSparseTensors). Tensors of devices take a moment in
// between, for their bytes to come to the host:
//
//   Encoder encoder(message, options, route);
//   auto error = encoder.describe();
//   ... encoder.depart(), and wait for the devices ...
//   auto encoded = encoder.finish();
//
// Owns: the message, and the storages that are on devices, until finish().
// Thread: one at a time.
class Encoder {
 public:
  Encoder(
      c10::intrusive_ptr<torch::distributed::rpc::Message> message,
      const EncodeOptions& options,
      const device::Route& route)
      : message_(std::move(message)),
        options_(options),
        tensors_(options.inlineThreshold, route) {}

  // Fails with kInvalid for tensors that cannot be sent, and names the first.
  // What `route` refers to is not used afterwards.
  base::Error describe();
  // Queues on the current streams what brings tensors from their devices, by
  // `beside` if it can. True when finish() has to wait until what is queued is
  // over. `launcher` may be null.
  base::Result<bool> depart(
      device::SendingWay* beside,
      device::Launcher* launcher);
  // Not null: bulk is on its way to the host in pieces, and finish() need only
  // wait for the first bytes of it.
  const std::shared_ptr<device::PinnedFilling>& filling() const {
    return staged_.filling;
  }
  // At most once.
  base::Result<Encoded> finish();

 private:
  base::Error write(Encoded& encoded);
  std::vector<uint64_t> sumsOf(const wire::CallFrame& frame) const;

  const c10::intrusive_ptr<torch::distributed::rpc::Message> message_;
  const EncodeOptions options_;
  TensorEncoder tensors_;
  std::vector<device::Departing> departing_;
  device::Staged staged_;
  device::Departure departure_;
};

// All steps of an Encoder, for a message without tensors on devices.
base::Result<Encoded> encode(
    const c10::intrusive_ptr<torch::distributed::rpc::Message>& message,
    const EncodeOptions& options,
    const device::Route& route = {});

// Turns one received frame into a message, in two steps because the bulk needs
// memory before it can arrive:
//
//   auto decoder = Decoder::parse(incoming.head());
//   auto spans =
//       decoder.value().allocate(cache, incoming.bulkSizes(), devices);
//   incoming.receive(spans.value(), ...);  // and when that is done:
//   auto message = decoder.value().finish();
//
// Tensors for devices are ordered after the current streams that finish() runs
// with.
//
// Owns: the receive buffers, until finish(); not the head, which outlives it.
// Thread: one at a time.
class Decoder {
 public:
  // Fails with kCorrupted if a checksum is wrong, with kInvalid for all else.
  static base::Result<Decoder> parse(base::ConstSpan head);

  const wire::CallHeader& header() const {
    return view_.header();
  }

  // Whether there are tensors for devices.
  bool hasDevices() const {
    return view_.hasDevices();
  }
  // Whether there are tensors beside the frame, and what their way says.
  bool hasBeside() const {
    return view_.hasBeside();
  }
  base::ConstSpan note() const {
    return view_.note();
  }

  // Returns a storage over the memory of bulk buffer `index` itself, which has
  // `size` bytes; the span of the buffer is then null. Or returns no storage:
  // then allocate() takes memory for the buffer.
  using Adopt = std::function<c10::Storage(size_t index, size_t size)>;
  // Memory for the bulk, in the order in which it was sent; `announced` has the
  // sizes that the transport will deliver. To be called once, also when there
  // is no bulk. Fails with kInvalid when these sizes are not those of the head,
  // or when a tensor is for a device that is not among `devices`; with
  // kOverloaded when there is no memory. `cache` outlives finish().
  base::Result<std::vector<base::MutableSpan>> allocate(
      memory::BufferCache& cache,
      const std::vector<uint64_t>& announced,
      device::DeviceList devices,
      const Adopt& adopt = nullptr);

  // Lets bulk for devices be copied there while the rest arrives, on the
  // streams of `landing`. These must be the current streams when finish() is
  // called. To be called after allocate().
  void landOn(std::shared_ptr<device::Landing> landing);

  // Empty when the payload is bulk.
  base::ConstSpan payload() const {
    return view_.payload();
  }
  bool payloadIsBulk() const {
    return view_.payloadBulk();
  }
  // Whether the sender has sent checksums.
  bool isChecked() const {
    return view_.hasSums();
  }

  // At most once, after the bulk has arrived. `beside` brings the tensors that
  // travel beside the frame; null if the connection has no such way. `launcher`
  // may be null. Fails with kInvalid, with kOverloaded when there is no memory,
  // or with kCorrupted when a checksum is not the sender's.
  base::Result<c10::intrusive_ptr<torch::distributed::rpc::Message>> finish(
      device::ReceivingWay* beside = nullptr,
      device::Launcher* launcher = nullptr);
  // If finish() has failed, and while the bytes given to parse() are there: the
  // message with an undefined tensor for each tensor. Null if the payload has
  // not arrived, or may not be what was sent.
  c10::intrusive_ptr<torch::distributed::rpc::Message> withoutTensors(
      const base::Error& failure) const;
  // After finish(): the checksums that devices are still computing. They must
  // be compared before anybody sees the message.
  PendingSums takePendingSums() {
    return std::move(pending_);
  }

 private:
  explicit Decoder(wire::CallFrameView view) : view_(view) {}
  using Storages = c10::SmallVector<c10::Storage, 8>;

  base::Error decode(
      device::ReceivingWay* beside,
      device::Launcher* launcher,
      c10::intrusive_ptr<torch::distributed::rpc::Message>& message);
  base::Error takeStorages(Storages& storages);
  base::Error placeStorages(
      device::ReceivingWay* beside,
      device::Launcher* launcher,
      Storages& storages,
      Storages& onHost);
  base::Error placeBeside(device::ReceivingWay* beside, Storages& storages);
  // Whether the checksum is compared on the storage's device, later.
  bool isSummedLater(
      const wire::StorageView& storage,
      device::Launcher* launcher) const;
  base::Error compareLater(
      const device::Unstaged& placed,
      const std::vector<device::Arriving>& arriving,
      const std::vector<size_t>& arrivingAt,
      device::Launcher* launcher);
  void compareLater(
      const device::Arrived& arrived,
      const std::vector<device::Expected>& expected,
      const std::vector<size_t>& places);
  // The storage as the sender had it, before narrowing, on the CPU or the meta
  // device. `bulk` has its bytes if it came as bulk.
  base::Result<c10::Storage> hostStorageOf(
      const wire::StorageView& storage,
      c10::Storage bulk);
  base::Error allocateBulk(
      memory::BufferCache& cache,
      const std::vector<uint64_t>& announced,
      const Adopt& adopt,
      std::vector<base::MutableSpan>& spans);

  wire::CallFrameView view_;
  std::vector<char> payload_;
  // The bulk's storages; those for a device are in pinned memory.
  std::vector<c10::Storage> bulk_;
  std::shared_ptr<device::Landing> landing_; // or null
  memory::BufferCache* cache_ = nullptr; // set by allocate()
  PendingSums pending_;
};

} // namespace torch_rpc_ext::agent
