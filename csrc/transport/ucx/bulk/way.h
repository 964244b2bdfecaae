#pragma once

#include "base/buffer.h"
#include "memory/shared_map.h"
#include "transport/transport.h"
#include "transport/ucx/bulk/link.h"
#include "transport/ucx/bulk/resources.h"
#include "transport/ucx/bulk/transfers.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

// Bulk that this end moves into its own memory.
struct Fetch {
  uint64_t transfer = 0; // the peer's number
  uint32_t firstSpan = 0; // of the transfer; the others follow
  std::vector<BulkEntry> from = {};
  std::vector<base::MutableSpan> into = {}; // of the same sizes
  Callback callback = nullptr;
  Incoming::Arrived arrived = nullptr; // may be null
};

// A way in which bulk gets from one end of a connection to the other. The
// object of one connection does the work of both ends: that of the sender for
// bulk that this end sends, and that of the receiver for the peer's bulk.
//
// The sender writes into the frame what each way needs to know of a span, and
// the receiver chooses. A new way is a file with a subclass and a factory, and
// the factory's name in kWays.
//
// Thread: any.
// Outlives: nothing; what it is made with outlives it.
class Way {
 public:
  virtual ~Way() = default;

  // ---- the sender's end ----

  // Writes into `entry` what the receiver needs to get `span`, of our transfer
  // `transfer`, in this way; nothing if the span cannot go this way.
  virtual void offer(
      Locked& /*locked*/,
      uint64_t /*transfer*/,
      const BulkSpan& /*span*/,
      BulkEntry& /*entry*/) {}
  // Our transfer is over. If the memory of the spans may not be used again, the
  // peer may still be using it.
  virtual void release(
      Locked& /*locked*/,
      uint64_t /*transfer*/,
      const Spans& /*spans*/,
      bool /*mayUseAgain*/) {}

  // ---- the receiver's end ----

  // Whether map() is likely to return memory.
  virtual bool maps(const BulkEntry& /*entry*/) const {
    return false;
  }
  // The memory of the span itself, to be used in place; null if this way does
  // not offer that. Memory of the peer is the peer's again when
  // Exchange::done() says so.
  virtual std::shared_ptr<memory::SharedMap> map(const BulkEntry& /*entry*/) {
    return nullptr;
  }
  // Whether fetch() can bring all these spans.
  virtual bool takes(const std::vector<BulkEntry>& from) const = 0;
  virtual void fetch(Fetch fetch) = 0;

  // ---- both ends ----

  // A message from the peer about bulk. False if the message is not of this
  // way.
  virtual bool onMessage(Locked& /*locked*/, const Message& /*message*/) {
    return false;
  }
  // The connection is over.
  virtual void end(Locked& /*locked*/, const base::Error& /*why*/) {}
};

// What a way is made with.
struct Ends {
  Link& link;
  const Peer& peer;
  Transfers& transfers; // ours
  Resources& resources;
};

using MakeWay = std::unique_ptr<Way>(const Ends&);
MakeWay lentMaps; // lent_maps.cpp
MakeWay cma; // cma.cpp
MakeWay pulled; // pulled.cpp

// All ways. The receiver takes the first that can bring the spans.
inline constexpr MakeWay* kWays[] = {lentMaps, cma, pulled};

} // namespace torch_rpc_ext::transport::ucx::bulk
