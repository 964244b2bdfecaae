#include "transport/ucx/bulk/transfers.h"

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::transport::ucx::bulk {

void Transfers::add(
    Locked&,
    base::Buffer frame,
    Spans spans,
    Callback callback) {
  Transfer& transfer = transfers_[next_++];
  if (frame.size() != 0) {
    transfer.frame = std::make_shared<base::Buffer>(std::move(frame));
  }
  transfer.spans = std::move(spans);
  transfer.callback = std::move(callback);
}

const Spans* Transfers::find(Locked&, uint64_t id) const {
  auto it = transfers_.find(id);
  return it == transfers_.end() ? nullptr : &it->second.spans;
}

bool Transfers::sendBegins(Locked&, uint64_t id) {
  Transfer& transfer = transfers_.at(id);
  if (transfer.asked == 2) {
    return false;
  }
  ++transfer.asked;
  ++transfer.sends;
  return true;
}

void Transfers::sendEnds(
    Locked& locked,
    uint64_t id,
    const base::Error& error) {
  auto it = transfers_.find(id);
  if (it == transfers_.end()) {
    return;
  }
  --it->second.sends;
  if (error && !it->second.done) {
    it->second.done = true;
    it->second.error = error;
  }
  finish(locked, it);
}

void Transfers::kept(Locked&, uint64_t id) {
  auto it = transfers_.find(id);
  if (it != transfers_.end()) {
    it->second.kept = true;
  }
}

void Transfers::done(
    Locked& locked,
    uint64_t id,
    base::Error error,
    bool forked) {
  auto it = transfers_.find(id);
  if (it != transfers_.end()) {
    it->second.done = true;
    it->second.forked = forked;
    it->second.error = std::move(error);
    finish(locked, it);
  }
}

void Transfers::fail(
    Locked& locked,
    const base::Error& error,
    const std::function<void(Callback)>& hold) {
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    it->second.done = true;
    it->second.error = error;
    if (hold && !it->second.kept) {
      // Held, because a peer that is still reading must not see what is written
      // into this memory next.
      hold([callback = it->second.callback,
            frame = it->second.frame,
            spans = it->second.spans](const base::Error&) {});
    }
    finish(locked, it++);
  }
}

bool Transfers::pending(Locked&) const {
  return std::any_of(
      transfers_.begin(), transfers_.end(), [](const auto& entry) {
        return !entry.second.kept;
      });
}

void Transfers::finish(Locked& locked, Map::iterator it) {
  Transfer& transfer = it->second;
  if (!transfer.done || transfer.sends != 0) {
    return;
  }
  released_(
      locked,
      it->first,
      transfer.spans,
      /*mayUseAgain=*/!transfer.error && !transfer.forked);
  // The spans may hold the last reference to a tensor, so they, too, are
  // dropped without the lock.
  locked.defer([callback = std::move(transfer.callback),
                error = std::move(transfer.error),
                spans = std::move(transfer.spans)] {
    if (callback) {
      callback(error);
    }
  });
  transfers_.erase(it);
}

} // namespace torch_rpc_ext::transport::ucx::bulk
