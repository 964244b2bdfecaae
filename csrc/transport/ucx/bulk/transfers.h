#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "transport/transport.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

using Spans = std::vector<BulkSpan>;

// The bulk of one connection that the peer has not yet taken. A transfer is the
// bulk of one message, and the frame of that message if the frame is big.
//
// Owns: the big frames; the spans and callbacks of the transfers, which hold
//   all other memory that the peer reads.
// Thread: any.
class Transfers {
 public:
  // Runs when a transfer is over, before its callback. `mayUseAgain`: the peer
  // cannot see what is written into the memory next.
  using Released = std::function<
      void(Locked&, uint64_t id, const Spans& spans, bool mayUseAgain)>;

  explicit Transfers(Released released) : released_(std::move(released)) {}

  // The number by which the peer will ask for the spans of the next add().
  uint64_t next(Locked&) const {
    return next_;
  }
  // `spans` are `frame`, which may be empty, and then the bulk. `callback`
  // fires when the peer does not need them any more.
  void add(Locked&, base::Buffer frame, Spans spans, Callback callback);

  // Whether there is, or was, such a transfer.
  bool wasAdded(Locked&, uint64_t id) const {
    return id != 0 && id < next_;
  }
  // Null if no such transfer exists, or if the transfer has ended.
  const Spans* find(Locked&, uint64_t id) const;

  // To be called before and after the send of a transfer over a Channel: until
  // the send ends, the channel may read the memory, whatever the peer says.
  // False if the peer asks for the transfer too often: it may ask once for the
  // frame, if that is lent, and once for the bulk.
  bool sendBegins(Locked&, uint64_t id);
  void sendEnds(Locked&, uint64_t id, const base::Error& error);

  // The peer has mapped memory of the transfer and keeps that for now. It does
  // not read the other memory of the transfer any more.
  void kept(Locked&, uint64_t id);
  // The peer does not need the transfer any more. Does nothing if the transfer
  // has already ended. `forked`: a forked child of the peer may keep the memory
  // for longer than the peer.
  void done(Locked&, uint64_t id, base::Error error, bool forked = false);

  // The connection is over. What keeps the memory of transfers that the peer
  // may still be reading goes to `hold`, too; a null `hold` means that the peer
  // cannot be reading. All callbacks fire with `error`, once no channel reads
  // the memory any more.
  void fail(
      Locked&,
      const base::Error& error,
      const std::function<void(Callback)>& hold);

  // Whether the peer may still be reading our memory.
  bool pending(Locked&) const;

 private:
  struct Transfer {
    std::shared_ptr<base::Buffer> frame; // null: not big
    Spans spans;
    Callback callback;
    bool done = false;
    bool kept = false;
    bool forked = false;
    base::Error error;
    uint32_t sends = 0;
    uint32_t asked = 0;
  };
  using Map = std::unordered_map<uint64_t, Transfer>;

  void finish(Locked&, Map::iterator it);

  const Released released_;
  uint64_t next_ = 1;
  Map transfers_;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
