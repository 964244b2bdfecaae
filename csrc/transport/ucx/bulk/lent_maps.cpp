#include "transport/ucx/bulk/way.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

using memory::SharedMap;

// Shared memory that the receiver maps and uses in place. Memory that belongs
// to the receiver is returned: the sender only names the memory (kReturned),
// and uses it no more. Other memory is lent, until the receiver says that it
// has let go of the memory, or returns it.
//
// Owns: the table of what is lent, which keeps that memory mapped.
class LentMaps final : public Way {
 public:
  explicit LentMaps(const Ends& ends) : ends_(ends) {}

  void offer(Locked&, uint64_t transfer, const BulkSpan& span, BulkEntry& entry)
      override {
    if (!ends_.peer.mayReadHere || span.map == nullptr ||
        span.map->discarded()) {
      return;
    }
    const memory::SharedRegion region = span.map->region();
    entry.region = region.id;
    if (span.map->isForeign()) {
      entry.fd = kReturned;
      return;
    }
    entry.fd = static_cast<uint64_t>(region.fd);
    if (span.isCommon) {
      entry.fd |= kCommon;
    } else {
      lent_[region.id] = {transfer, span.size, span.map};
    }
  }

  void release(Locked&, uint64_t transfer, const Spans& spans, bool mayUseAgain)
      override {
    returns_.erase(transfer);
    for (const BulkSpan& span : spans) {
      if (span.map == nullptr || span.map->isForeign()) {
        continue;
      }
      const auto lent = lent_.find(span.map->region().id);
      if (lent != lent_.end() && lent->second.transfer == transfer) {
        lent_.erase(lent);
      }
      if (!mayUseAgain) {
        span.map->discard();
      }
    }
  }

  bool maps(const BulkEntry& entry) const override {
    return ends_.peer.readable() && entry.region != 0;
  }

  std::shared_ptr<SharedMap> map(const BulkEntry& entry) override {
    if (entry.fd != kReturned) {
      return maps(entry) ? mapOf(entry) : nullptr;
    }
    std::shared_ptr<SharedMap> memory;
    ends_.link.worker().runLocked(
        [&](Locked& locked) { memory = takeBack(locked, entry); });
    return memory;
  }

  // True if the peer returns memory that map() has not found, because this end
  // has not lent that memory. Then fetch() fails.
  bool takes(const std::vector<BulkEntry>& from) const override {
    return std::any_of(from.begin(), from.end(), [](const BulkEntry& entry) {
      return entry.fd == kReturned;
    });
  }
  void fetch(Fetch fetch) override {
    // When a peer has died, nothing is lent to the peer any more.
    fetch.callback(
        isOver(ends_.link.peer())
            ? ends_.link.ending()
            : base::Error{
                  base::ErrorKind::kInvalid,
                  "the sender returns memory that it has not been sent"});
  }

 private:
  struct Lent {
    uint64_t transfer = 0;
    uint64_t size = 0;
    std::shared_ptr<SharedMap> map;
  };

  std::shared_ptr<SharedMap> mapOf(const BulkEntry& entry) {
    if ((entry.fd & kCommon) == 0) {
      return ends_.resources.maps().map(ends_.peer.pid, entry);
    }
    return SharedMap::open(
        ends_.peer.pid,
        entry.fd & ~kCommon,
        entry.region,
        entry.size,
        /*isPrivate=*/true);
  }

  // A transfer whose spans have all come back is over: the peer acknowledges it
  // later, but nobody need wait for that.
  std::shared_ptr<SharedMap> takeBack(Locked& locked, const BulkEntry& entry) {
    const auto it = lent_.find(entry.region);
    if (it == lent_.end() || it->second.size != entry.size) {
      return nullptr;
    }
    const Lent lent = std::move(it->second);
    lent_.erase(it);
    const Spans* const spans = ends_.transfers.find(locked, lent.transfer);
    if (spans != nullptr && ++returns_[lent.transfer] == spans->size()) {
      ends_.transfers.done(locked, lent.transfer, {});
    }
    return lent.map;
  }

  const Ends ends_;
  std::unordered_map<uint64_t, Lent> lent_; // by region
  // How many spans of a transfer have come back, by transfer.
  std::unordered_map<uint64_t, size_t> returns_;
};

} // namespace

std::unique_ptr<Way> lentMaps(const Ends& ends) {
  return std::make_unique<LentMaps>(ends);
}

} // namespace torch_rpc_ext::transport::ucx::bulk
