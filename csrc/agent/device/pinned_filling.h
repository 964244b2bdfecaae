#pragma once

#include "agent/device/event_waiter.h"
#include "agent/device/streams.h"
#include "base/error.h"
#include "transport/fill_level.h"

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace torch_rpc_ext::agent::device {

// So much is copied from a device before it may leave.
inline constexpr size_t kPieceBytes = size_t{4} << 20;

// Pinned memory that devices are filling, piece by piece, in the order in which
// it was queued. An error of one piece is that of all behind it.
//
// Owns: the events, and what the copies read and write until they are over.
// Thread: add() and start() the one that queues the copies; whenFilled() any.
class PinnedFilling final : public transport::FillLevel,
                            public std::enable_shared_from_this<PinnedFilling> {
 public:
  // What has been queued on `stream` fills `bytes` more. `held` is what it
  // reads and writes.
  void add(
      const c10::Stream& stream,
      uint64_t bytes,
      std::vector<c10::Storage> held);

  // All of it is queued: begins to wait, on `waiter`, which outlives it.
  void start(EventWaiter& waiter);

  // The end of the first piece that has bytes.
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
  std::deque<Piece> pieces_; // from start() on of the thread of `waiter_`
};

} // namespace torch_rpc_ext::agent::device
