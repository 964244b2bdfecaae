#include "transport/ucx/transfers.h"

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

uint64_t Transfers::add(
    Locked&,
    base::Buffer frame,
    const std::vector<BulkSpan>& bulk,
    Callback callback) {
  const uint64_t id = next_++;
  Transfer& transfer = transfers_[id];
  transfer.frame = std::move(frame);
  if (transfer.frame.size() != 0) {
    transfer.spans.push_back(
        {base::ConstSpan{transfer.frame.data(), transfer.frame.size()}});
  }
  for (const BulkSpan& span : bulk) {
    transfer.spans.push_back(span);
    if (span.owner != nullptr && !span.isCommon) {
      transfer.regions.push_back(span.region.id);
      lent_[span.region.id] = {id, span.size, span.owner};
    }
  }
  transfer.callback = std::move(callback);
  return id;
}

std::shared_ptr<memory::SharedMap>
Transfers::takeBack(Locked& locked, uint64_t region, uint64_t size) {
  const auto lent = lent_.find(region);
  if (lent == lent_.end() || lent->second.size != size) {
    return nullptr;
  }
  auto owner = std::move(lent->second.owner);
  const auto it = transfers_.find(lent->second.transfer);
  lent_.erase(lent);
  Transfer& transfer = it->second;
  std::erase(transfer.regions, region);
  const bool regionsOnly = std::all_of(
      transfer.spans.begin(), transfer.spans.end(), [](const auto& span) {
        return span.owner != nullptr && !span.isCommon;
      });
  if (transfer.regions.empty() && regionsOnly) {
    transfer.done = true;
    finish(locked, it);
  }
  return owner;
}

const Transfers::Spans* Transfers::find(Locked&, uint64_t id) const {
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

void Transfers::adopted(Locked&, uint64_t id) {
  auto it = transfers_.find(id);
  if (it != transfers_.end()) {
    it->second.adopted = true;
  }
}

void Transfers::forked(Locked& locked, uint64_t id) {
  if (const Spans* const spans = find(locked, id)) {
    for (const BulkSpan& span : *spans) {
      if (span.owner != nullptr) {
        span.owner->discard();
      }
    }
  }
}

void Transfers::done(Locked& locked, uint64_t id, base::Error error) {
  auto it = transfers_.find(id);
  if (it != transfers_.end()) {
    it->second.done = true;
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
    if (hold && !it->second.adopted) {
      // Held, because a peer that is still reading must not see what is written
      // into this memory next.
      hold(it->second.callback);
    }
    finish(locked, it++);
  }
}

bool Transfers::lending(Locked&) const {
  return std::any_of(
      transfers_.begin(), transfers_.end(), [](const auto& entry) {
        return !entry.second.adopted;
      });
}

void Transfers::finish(Locked& locked, Map::iterator it) {
  Transfer& transfer = it->second;
  if (!transfer.done || transfer.sends != 0) {
    return;
  }
  for (const uint64_t region : transfer.regions) {
    lent_.erase(region);
  }
  if (transfer.callback) {
    locked.defer([callback = std::move(transfer.callback),
                  error = std::move(transfer.error)] { callback(error); });
  }
  transfers_.erase(it);
}

} // namespace torch_rpc_ext::transport::ucx
