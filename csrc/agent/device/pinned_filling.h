#pragma once

#include "agent/device/event_waiter.h"
#include "agent/device/fill_level.h"
#include "agent/device/streams.h"
#include "base/error.h"

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Bytes are sent as soon as a piece of this size has been copied from a device.
inline constexpr size_t kPieceBytes = size_t{4} << 20;

// Pinned memory that devices fill piece by piece, in the order in which the
// copies were queued. If a piece fails, all pieces after it fail with its
// error.
//
// Owns: the events, and the memory that copies read and write until they are
//   over.
// Thread: add() and start(): the thread that queues the copies.
//   whenFilled(): any.
class PinnedFilling final : public FillLevel,
                            public std::enable_shared_from_this<PinnedFilling> {
 public:
  // The work queued on `stream` so far fills the next `bytes` bytes. `held` is
  // the memory that this work reads and writes.
  void add(
      const c10::Stream& stream,
      uint64_t bytes,
      std::vector<c10::Storage> held);

  // To be called after the last add(), of which there must be at least one:
  // begins to wait for the events. `waiter` must outlive this object.
  void start(EventWaiter& waiter);

  // The end of the first piece that is not empty.
  uint64_t firstBytes() const {
    return firstBytes_;
  }

 private:
  struct Piece {
    Events events;
    uint64_t end = 0;
    std::vector<c10::Storage> held;
  };

  void awaitNext();
  void pieceEnds(uint64_t end, const base::Error& error);

  EventWaiter* waiter_ = nullptr;
  uint64_t firstBytes_ = 0;
  uint64_t queued_ = 0;
  std::deque<Piece> pieces_; // after start() only for the thread of `waiter_`
};

} // namespace torch_rpc_ext::agent::device
