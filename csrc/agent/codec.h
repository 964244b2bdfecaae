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

// Between torch's rpc::Message and the call frame (wire/call_frame.h). Tensors
// of CPU and CUDA: strided ones of every dtype, sparse ones (COO, CSR, CSC,
// BSR, BSC); affinely quantised ones of the CPU; strided ones of the meta
// device, of which there is nothing but the description. Sparse and quantised
// tensors travel as the strided tensors they consist of and not through torch's
// jit pickler: its Unpickler believes the sizes and indices that it is told,
// and reads and allocates out of bounds when a peer lies.

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
  // All of the bulk is tensors of the CPU that stay there: what the receiver
  // could map.
  bool mappable = false;
  // What travels beside the frame (device/way.h): to be held likewise, and told
  // what has become of the frame.
  std::shared_ptr<device::Parcel> parcel;

  // Whether it must be held until then.
  bool borrows() const {
    return !bulk.empty() || parcel != nullptr;
  }
  // Whether the receiver copies the bulk out of memory that is the sender's
  // until then. All of the bulk is in shared memory, or none.
  bool borrowsBulk() const {
    return !bulk.empty() && bulk.front().map == nullptr;
  }
  // Gives the memory of the bulk away, where all of it is in receive buffers,
  // or came mapped over `to`, and nobody else refers to it: returns true then.
  // The receiver will keep and write to it. To be called when the message
  // itself is gone. Buffers that could be given away but are not shared memory
  // will be, from the next on (`cache`).
  bool giveAway(memory::BufferCache& cache, const transport::ConnectionPtr& to);
};

// What a frame is made from.
struct EncodeOptions {
  uint64_t callId = 0;
  wire::CallKind kind = wire::CallKind::kRequest;
  // Storages, and the payload, of up to so many bytes are copied into the head,
  // larger ones go as bulk.
  uint64_t inlineThreshold = 0;
  // What storages of float32 tensors travel as.
  wire::WireDtype dtype = wire::WireDtype::kFloat32;
  // Of a request: what the caller wants for the answer's.
  std::optional<wire::WireDtype> answer = std::nullopt;
  // Of a request: ms for which the caller still waits; 0 without limit.
  uint32_t timeout = 0;
  bool checked = false; // with checksums
  // Bulk from devices may leave while the rest is copied (device/staging.h).
  bool inPieces = false;
  // Memory for what is narrowed here; null for torch's.
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
  // After it `route` is not needed any more.
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

// All of it, for messages without tensors of devices.
base::Result<Encoded> encode(
    const c10::intrusive_ptr<torch::distributed::rpc::Message>& message,
    const EncodeOptions& options,
    const device::Route& route = {});

// Turns one received frame into a message, in two steps because the bulk needs
// memory before it can arrive:
//
//   auto decoder = Decoder::parse(incoming.head());
//   auto spans = decoder.value().allocate(cache, incoming.bulkSizes());
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
  // Fails with kInvalid.
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

  // May make a storage over the memory of a bulk buffer itself, of `size`
  // bytes: then the span of the buffer is null.
  using Adopt = std::function<c10::Storage(size_t index, size_t size)>;
  // Memory for the bulk, in the order in which it was sent; `announced` are
  // the sizes that the transport will deliver. To be called once, also when
  // there is none. Fails with kInvalid when they are not those of the head or
  // when a tensor is for none of `devices`, with kOverloaded when there is no
  // memory. `cache` outlives finish().
  base::Result<std::vector<base::MutableSpan>> allocate(
      memory::BufferCache& cache,
      const std::vector<uint64_t>& announced,
      device::Devices devices,
      const Adopt& adopt = nullptr);

  // Lets bulk for devices be copied there while the rest arrives, on the
  // streams of `landing`, which finish() is called with then. After
  // allocate().
  void landOn(std::shared_ptr<device::Landing> landing);

  // Whether the sender has sent checksums.
  // Empty when it is bulk.
  base::ConstSpan payload() const {
    return view_.payload();
  }
  bool payloadIsBulk() const {
    return view_.payloadBulk();
  }
  bool isChecked() const {
    return view_.hasSums();
  }

  // At most once, after the bulk has arrived; `beside` for messages that come
  // over a connection that has such a way; `launcher` may be null. Fails with
  // kInvalid, with kOverloaded when there is no memory, or with kCorrupted when
  // a checksum is not the sender's.
  base::Result<c10::intrusive_ptr<torch::distributed::rpc::Message>> finish(
      device::ReceivingWay* beside = nullptr,
      device::Launcher* launcher = nullptr);
  // After finish(): checksums that devices are still computing. To be compared
  // before anybody sees the message.
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
  // Whether its checksum is computed on its device, once it is there.
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
  // A storage for the CPU, as the sender had it.
  base::Result<c10::Storage> onHostAsWas(
      const wire::StorageView& storage,
      c10::Storage bulk);
  base::Error allocateBulk(
      memory::BufferCache& cache,
      const std::vector<uint64_t>& announced,
      const Adopt& adopt,
      std::vector<base::MutableSpan>& spans);

  wire::CallFrameView view_;
  std::vector<char> payload_; // when it is bulk
  std::vector<c10::Storage> bulk_; // pinned, for a device
  std::shared_ptr<device::Landing> landing_; // or null
  memory::BufferCache* cache_ = nullptr; // from allocate() on
  bool allocated_ = false;
  PendingSums pending_;
};

} // namespace torch_rpc_ext::agent
