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

// One event at a time: they are reached in this order, and each that waits is
// asked again and again.
void PinnedFilling::awaitNext() {
  Piece piece;
  {
    std::lock_guard lock(mutex_);
    if (pieces_.empty()) {
      return;
    }
    piece = std::move(pieces_.front());
    pieces_.pop_front();
  }
  waiter_->whenComplete(
      std::move(piece.events),
      [self = shared_from_this(), end = piece.end, held = std::move(piece.held)](
          const base::Error& error) { self->reached(end, error); });
}

void PinnedFilling::reached(uint64_t end, const base::Error& error) {
  std::vector<transport::Callback> ready;
  std::deque<Piece> dropped;
  {
    std::lock_guard lock(mutex_);
    filled_ = error ? filled_ : end;
    error_ = error;
    if (error) {
      dropped.swap(pieces_);
    }
    const auto isReady = [&](const auto& waiting) {
      return error || waiting.first <= filled_;
    };
    for (auto& waiting : waiting_) {
      if (isReady(waiting)) {
        ready.push_back(waiting.second);
      }
    }
    std::erase_if(waiting_, isReady);
  }
  if (!error) {
    awaitNext();
  }
  for (const auto& then : ready) {
    then(error);
  }
}

void PinnedFilling::whenFilled(uint64_t bytes, transport::Callback then) {
  base::Error error;
  {
    std::lock_guard lock(mutex_);
    if (filled_ < bytes) {
      if (!error_) {
        waiting_.emplace_back(bytes, std::move(then));
        return;
      }
      error = error_;
    }
  }
  then(error);
}

} // namespace torch_rpc_ext::agent::device
