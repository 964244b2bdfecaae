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

// The bulk of messages that the peer of one connection has not yet taken.
//
// Owns: what their callbacks hold, which is the memory that the peer reads.
// Thread: any.
class Transfers {
 public:
  using Spans = std::vector<BulkSpan>;

  // Lends `frame`, which may be empty, and then `bulk`. Returns the number by
  // which the peer asks for them. `callback` fires when the peer needs them no
  // more.
  uint64_t add(
      Locked&,
      base::Buffer frame,
      const std::vector<BulkSpan>& bulk,
      Callback callback);

  // Null for a number that does not exist, or has ended.
  const Spans* find(Locked&, uint64_t id) const;

  // A region of ours that the peer has, and gives back; null if it has none
  // such. With its last region a transfer ends: the peer's word that it has
  // let go of what it returned may come later, and need not be waited for.
  std::shared_ptr<memory::SharedMap>
  takeBack(Locked&, uint64_t region, uint64_t size);

  // Around a send through UCX, which may read the memory until it ends,
  // whatever the peer says. False for one that the peer asks for too often:
  // the frame, if it is lent, and the bulk are asked for once each.
  bool sendBegins(Locked&, uint64_t id);
  void sendEnds(Locked&, uint64_t id, const base::Error& error);

  // The peer keeps the memory for now, and reads nothing of ours.
  void adopted(Locked&, uint64_t id);
  // A child of the peer's may keep the memory for longer than the peer.
  void forked(Locked&, uint64_t id);
  // The peer needs it no more. A late word about one that has ended is none.
  void done(Locked&, uint64_t id, base::Error error);

  // The connection is over. What the peer may still be reading goes to `hold`
  // (null: it cannot be reading), the rest is released.
  void fail(
      Locked&,
      const base::Error& error,
      const std::function<void(Callback)>& hold);

  // The peer may still be reading our memory.
  bool lending(Locked&) const;

 private:
  struct Transfer {
    base::Buffer frame;
    Spans spans;
    std::vector<uint64_t> regions; // that the peer has
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
