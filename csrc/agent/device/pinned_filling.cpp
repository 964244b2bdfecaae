#include "agent/device/pinned_filling.h"

#include <utility>

namespace torch_rpc_ext::agent::device {

void PinnedFilling::add(
    const c10::Stream& stream,
    uint64_t bytes,
    std::vector<c10::Storage> held) {
  queued_ += bytes;
  if (firstBytes_ == 0) {
    firstBytes_ = queued_;
  }
  pieces_.push_back({record({stream}), queued_, std::move(held)});
}

void PinnedFilling::start(EventWaiter& waiter) {
  waiter_ = &waiter;
  awaitNext();
}

// Waits for one piece's events at a time: the pieces are filled in this order,
// and the waiter queries every event that it has again and again.
void PinnedFilling::awaitNext() {
  Piece piece = std::move(pieces_.front());
  pieces_.pop_front();
  waiter_->whenComplete(
      std::move(piece.events),
      [self = shared_from_this(),
       end = piece.end,
       held = std::move(piece.held)](const base::Error& error) {
        self->pieceEnds(end, error);
      });
}

void PinnedFilling::pieceEnds(uint64_t end, const base::Error& error) {
  if (error) {
    pieces_.clear();
    failed(error);
    return;
  }
  // Before reached(): what reached() calls must not delay the next piece.
  if (!pieces_.empty()) {
    awaitNext();
  }
  reached(end);
}

} // namespace torch_rpc_ext::agent::device
