#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "transport/transport.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// The bulk of one connection that the peer has not yet taken. A transfer is the
// bulk of one message, and the frame of that message if the frame is big.
//
// Owns: the big frames, and the callbacks of the transfers, which hold the
//   other memory that the peer reads.
// Thread: any.
class Transfers {
 public:
  using Spans = std::vector<BulkSpan>;

  // Lends `frame`, which may be empty, and then `bulk`. Returns the number by
  // which the peer asks for these spans. `callback` fires when the peer does
  // not need them any more.
  uint64_t add(
      Locked&,
      base::Buffer frame,
      const std::vector<BulkSpan>& bulk,
      Callback callback);

  // Null if no such transfer exists, or if the transfer has ended.
  const Spans* find(Locked&, uint64_t id) const;

  // Our region `region`, which the peer has, and gives back; null if the peer
  // has no such region. If a transfer consists only of regions, it ends when
  // the last of them comes back: the peer acknowledges the transfer later, but
  // nobody need wait for that.
  std::shared_ptr<memory::SharedMap>
  takeBack(Locked&, uint64_t region, uint64_t size);

  // To be called before and after the send of a transfer through UCX: until the
  // send ends, UCX may read the memory, whatever the peer says. False if the
  // peer asks for the transfer too often: it may ask once for the frame, if
  // that is lent, and once for the bulk.
  bool sendBegins(Locked&, uint64_t id);
  void sendEnds(Locked&, uint64_t id, const base::Error& error);

  // The peer has mapped the transfer's regions and keeps them for now. It does
  // not read the other memory of the transfer any more.
  void adopted(Locked&, uint64_t id);
  // A forked child of the peer may keep the memory for longer than the peer.
  void forked(Locked&, uint64_t id);
  // The peer does not need the transfer any more. Does nothing if the transfer
  // has already ended.
  void done(Locked&, uint64_t id, base::Error error);

  // The connection is over. Passes the callbacks of transfers that the peer may
  // still be reading to `hold`, too; a null `hold` means that the peer cannot
  // be reading. All callbacks fire with `error`, once UCX does not read the
  // memory any more.
  void fail(
      Locked&,
      const base::Error& error,
      const std::function<void(Callback)>& hold);

  // Whether the peer may still be reading our memory.
  bool lending(Locked&) const;

 private:
  struct Transfer {
    base::Buffer frame;
    Spans spans;
    std::vector<uint64_t> regions; // those that the peer has
    Callback callback;
    bool done = false;
    bool adopted = false;
    base::Error error;
    uint32_t sends = 0;
    uint32_t asked = 0;
  };
  using Map = std::unordered_map<uint64_t, Transfer>;
  struct Lent {
    uint64_t transfer = 0;
    uint64_t size = 0;
    std::shared_ptr<memory::SharedMap> owner;
  };

  void finish(Locked&, Map::iterator it);

  uint64_t next_ = 1;
  Map transfers_;
  std::unordered_map<uint64_t, Lent> lent_; // by region
};

} // namespace torch_rpc_ext::transport::ucx
