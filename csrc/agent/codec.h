#pragma once

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
#include <vector>

// Between torch's rpc::Message and the call frame (wire/call_frame.h). CPU
// tensors only: strided ones of every dtype, sparse ones (COO, CSR, CSC, BSR,
// BSC), affinely quantised ones. Sparse and quantised tensors travel as the
// strided tensors they consist of and not through torch's jit pickler: its
// Unpickler believes the sizes and indices that it is told, and reads and
// allocates out of bounds when a peer lies.

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

  // Gives the memory of the bulk away, where all of it is in receive buffers
  // that nobody else refers to: returns true then. The receiver will keep and
  // write to it. To be called when the message itself is gone. Buffers that
  // could be given away but are not shared memory will be, from the next on
  // (`cache`).
  bool giveAway(memory::BufferCache& cache);
  // After giveAway(), when the receiver has not returned the memory and nobody
  // knows whether it still uses it.
  void discard();
};

// Storages, and the payload, of up to `inlineThreshold` bytes are copied into
// the head, larger ones go as bulk. Views of one storage share it, but a
// tensor that is small beside its storage travels as a copy of its own (the
// rule is that of torch's cloneSparseTensors). Fails with kInvalid for tensors
// that cannot be sent, and names the first.
base::Result<Encoded> encode(
    const c10::intrusive_ptr<torch::distributed::rpc::Message>& message,
    uint64_t callId,
    wire::CallKind kind,
    uint64_t inlineThreshold,
    uint32_t flags = 0);

// Turns one received frame into a message, in two steps because the bulk needs
// memory before it can arrive:
//
//   auto decoder = Decoder::parse(incoming.head());
//   auto spans = decoder.value().allocate(cache, incoming.bulkSizes());
//   incoming.receive(spans.value(), ...);  // and when that is done:
//   auto message = decoder.value().finish();
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

  // May give the memory of a bulk buffer: then its span is null.
  using Adopt = std::function<std::shared_ptr<void>(size_t index)>;
  // Memory for the bulk, in the order in which it was sent; `announced` are
  // the sizes that the transport will deliver. To be called once, also when
  // there is none. Fails with kInvalid when they are not those of the head,
  // with kOverloaded when there is no memory.
  base::Result<std::vector<base::MutableSpan>> allocate(
      memory::BufferCache& cache,
      const std::vector<uint64_t>& announced,
      const Adopt& adopt = nullptr);

  // At most once, after the bulk has arrived. Fails with kInvalid.
  base::Result<c10::intrusive_ptr<torch::distributed::rpc::Message>> finish();

 private:
  explicit Decoder(wire::CallFrameView view) : view_(view) {}
  base::Error allocateBulk(
      memory::BufferCache& cache,
      const std::vector<uint64_t>& announced,
      const Adopt& adopt,
      std::vector<base::MutableSpan>& spans);

  wire::CallFrameView view_;
  std::vector<char> payload_; // when it is bulk
  std::vector<c10::Storage> bulk_;
  bool allocated_ = false;
};

} // namespace torch_rpc_ext::agent
