#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "memory/shared_map.h"
#include "transport/transport.h"
#include "transport/ucx/bulk/carried.h"
#include "transport/ucx/bulk/link.h"
#include "transport/ucx/bulk/resources.h"
#include "transport/ucx/bulk/transfers.h"
#include "transport/ucx/bulk/way.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

// The bulk of one open connection, in both directions: what this end sends and
// the peer has not yet taken, and what this end takes from the peer.
//
// Owns: the transfers, the ways, what frames carry, the acknowledgements that
//   are to be sent.
// Thread: any.
// Outlives: nothing; the Link owns it.
class Exchange {
 public:
  Exchange(Link& link, Resources& resources, Peer peer);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const Peer& peer() const {
    return peer_;
  }
  // Whether the peer can map shared memory of this process. If this process can
  // read the peer's memory, the peer is taken to be able to read ours, because
  // both have the same user and namespaces.
  bool sharesMemory() const {
    return peer_.mayReadHere && peer_.readable();
  }
  // A pointer that keeps the connection, too.
  std::shared_ptr<Exchange> keep() {
    return {link_.keep(), this};
  }

  // ---- bulk that this end sends ----

  // Sends a frame that has bulk, or is too big for one message.
  void send(
      Locked& locked,
      base::Buffer head,
      std::vector<BulkSpan> bulk,
      Callback callback);
  // Whether the peer may still be reading memory of this process.
  bool pending(Locked& locked) const {
    return transfers_.pending(locked);
  }

  // ---- bulk that this end takes ----

  // What the peer's frames carry.
  Carried& carried() {
    return carried_;
  }

  // As Way::maps() and Way::map().
  bool maps(const BulkEntry& entry) const;
  std::shared_ptr<memory::SharedMap> map(const BulkEntry& entry);
  // Moves bulk in the first way that can. If the connection ends meanwhile,
  // the callback gets the reason: the sender may have used its memory again
  // while this process read it, so the bytes cannot be trusted.
  void fetch(Fetch fetch);
  // Tells the peer what has become of the memory of `transfer`, `bytes` in all:
  // it is the peer's own again, unless kKept or kForked (protocol.h) is added
  // to `transfer`. The peer hears this at once after an error or if `bytes` is
  // large, else a little later, together with other messages.
  void done(uint64_t transfer, uint64_t bytes, const base::Error& error);

  // ---- what the two ends say about bulk ----

  void onMessage(Locked&, const Message& message);
  void onAcknowledged(Locked&, uint64_t transfer, base::Error error = {});
  // Sends the acknowledgements that done() has put off.
  void acknowledge(Locked&);
  // Takes out one acknowledgement, to travel in the header of another message;
  // 0 if there is none.
  uint64_t nextAcknowledgement(Locked&) {
    if (acknowledgements_.empty()) {
      return 0;
    }
    const uint64_t transfer = acknowledgements_.back();
    acknowledgements_.pop_back();
    return transfer;
  }

  // The connection is over; `hold` as for Transfers::fail().
  void end(
      Locked&,
      const base::Error& why,
      const std::function<void(Callback)>& hold);

 private:
  Link& link_;
  const Peer peer_;
  Carried carried_;
  Transfers transfers_;
  std::vector<std::unique_ptr<Way>> ways_; // in the order of kWays
  // Transfers of the peer that this end will acknowledge, one with each
  // message.
  std::vector<uint64_t> acknowledgements_;
  // Transfers whose memory this end has mapped and still uses. The peer is told
  // of them by acknowledge(), and not earlier.
  std::vector<uint64_t> kept_;
  bool acknowledgesSoon_ = false;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
