#include "transport/ucx/bulk/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

// If a message has more bytes of bulk than this, the peer is told at once that
// it has their memory back. Otherwise the next message to the peer says so.
constexpr uint64_t kMaxLazyBytes = 16u << 20;

} // namespace

Exchange::Exchange(Link& link, Resources& resources, Peer peer)
    : link_(link),
      peer_(std::move(peer)),
      carried_(!peer_.reachesUsAt.empty() && !sharesMemory()),
      transfers_([this](auto& locked, auto id, auto& spans, bool mayUseAgain) {
        for (const auto& way : ways_) {
          way->release(locked, id, spans, mayUseAgain);
        }
        carried_.release(locked, id);
      }) {
  for (MakeWay* const make : kWays) {
    ways_.push_back(make({link_, peer_, transfers_, resources}));
  }
}

void Exchange::send(
    Locked& locked,
    base::Buffer head,
    std::vector<BulkSpan> bulk,
    Callback callback) {
  const uint64_t transfer = transfers_.next(locked);
  FrameHeader header{
      .count = static_cast<uint32_t>(bulk.size()), .transfer = transfer};
  const size_t tableBytes = bulk.size() * sizeof(BulkEntry);
  const bool isBig = tableBytes + head.size() > kMaxEagerBytes;
  const bool isCarrying =
      !isBig && carried_.take(locked, transfer, bulk, link_.silence(locked));
  const auto entryOf = [&](const BulkSpan& span) {
    BulkEntry entry{.size = span.size};
    if (isCarrying) {
      entry.fd = kCarried;
      return entry;
    }
    for (const auto& way : ways_) {
      way->offer(locked, transfer, span, entry);
    }
    return entry;
  };
  size_t carriedBytes = 0;
  for (const BulkSpan& span : bulk) {
    carriedBytes += isCarrying ? span.size : 0;
  }
  base::Buffer data(tableBytes + carriedBytes + head.size());
  std::byte* end = data.data();
  const auto append = [&end](const void* bytes, size_t size) {
    if (size != 0) {
      std::memcpy(end, bytes, size);
      end += size;
    }
  };
  for (const BulkSpan& span : bulk) {
    const BulkEntry entry = entryOf(span);
    append(&entry, sizeof(entry));
  }
  if (isCarrying) {
    for (const BulkSpan& span : bulk) {
      append(span.data, span.size);
    }
  }
  append(head.data(), head.size());
  base::Buffer bigFrame;
  if (isBig) {
    // The frame itself becomes the first span, which the peer fetches.
    header.kind = FrameKind::kBigFrame;
    bigFrame = std::move(data);
    bulk.insert(bulk.begin(), BulkSpan{{bigFrame.data(), bigFrame.size()}});
    data = base::Buffer(sizeof(BulkEntry));
    const BulkEntry entry = entryOf(bulk.front());
    std::memcpy(data.data(), &entry, sizeof(entry));
  }
  transfers_.add(
      locked, std::move(bigFrame), std::move(bulk), std::move(callback));
  if (isCarrying) {
    transfers_.kept(locked, transfer); // the peer does not read our memory
  }
  link_.tell(locked, header, std::move(data));
}

bool Exchange::maps(const BulkEntry& entry) const {
  return std::any_of(ways_.begin(), ways_.end(), [&](const auto& way) {
    return way->maps(entry);
  });
}

std::shared_ptr<memory::SharedMap> Exchange::map(const BulkEntry& entry) {
  for (const auto& way : ways_) {
    if (auto memory = way->map(entry)) {
      return memory;
    }
  }
  return nullptr;
}

void Exchange::fetch(Fetch fetch) {
  fetch.callback = [self = keep(), callback = std::move(fetch.callback)](
                       const base::Error& failure) {
    self->link_.whenJudged(failure, [self, callback](const base::Error& error) {
      const bool lost = !error && isOver(self->link_.peer());
      callback(lost ? self->link_.ending() : error);
    });
  };
  const auto way =
      std::find_if(ways_.begin(), ways_.end(), [&](const auto& candidate) {
        return candidate->takes(fetch.from);
      });
  if (way != ways_.end()) {
    (*way)->fetch(std::move(fetch));
  } else {
    fetch.callback(
        {base::ErrorKind::kUnsupported, "there is no way for this bulk"});
  }
}

void Exchange::done(
    uint64_t transfer,
    uint64_t bytes,
    const base::Error& error) {
  link_.worker().post([self = keep(), transfer, bytes, error](Locked& locked) {
    if (self->link_.peer() != PeerState::kOpen) {
      return;
    }
    if (error || bytes > kMaxLazyBytes) {
      self->link_.tellReason(locked, FrameKind::kDone, transfer, error);
      return;
    }
    // A message of its own would wake a thread of the peer for this alone. The
    // answer to the call is often on its way, and takes this along.
    if ((transfer & kKept) != 0) {
      self->kept_.push_back(transfer);
    } else {
      // If the peer has not yet been told that its memory is kept, it need only
      // hear that the memory is its own again.
      std::erase(self->kept_, (transfer & ~kForked) | kKept);
      self->acknowledgements_.push_back(transfer);
    }
    if (!std::exchange(self->acknowledgesSoon_, true)) {
      self->link_.acknowledgeSoon(locked);
    }
  });
}

void Exchange::acknowledge(Locked& locked) {
  acknowledgesSoon_ = false;
  acknowledgements_.insert(acknowledgements_.end(), kept_.begin(), kept_.end());
  kept_.clear();
  while (!acknowledgements_.empty() && link_.peer() == PeerState::kOpen) {
    const uint64_t transfer = nextAcknowledgement(locked);
    link_.tell(locked, {.kind = FrameKind::kDone, .transfer = transfer}, {});
  }
}

void Exchange::onMessage(Locked& locked, const Message& message) {
  if (message.header.kind == FrameKind::kDone) {
    onAcknowledged(locked, message.header.transfer, reasonOf(message));
    return;
  }
  for (const auto& way : ways_) {
    if (way->onMessage(locked, message)) {
      return;
    }
  }
}

void Exchange::onAcknowledged(
    Locked& locked,
    uint64_t transfer,
    base::Error error) {
  const uint64_t id = transfer & ~(kKept | kForked);
  if ((transfer & kKept) != 0) {
    transfers_.kept(locked, id);
  } else {
    transfers_.done(locked, id, std::move(error), (transfer & kForked) != 0);
  }
}

void Exchange::end(
    Locked& locked,
    const base::Error& why,
    const std::function<void(Callback)>& hold) {
  transfers_.fail(locked, why, hold);
  for (const auto& way : ways_) {
    way->end(locked, why);
  }
}

} // namespace torch_rpc_ext::transport::ucx::bulk
