// UcxConnection, bulk: how a receiver gets bulk, and how the sender hears that
// the receiver has it.

#include "transport/ucx/bulk_chunks.h"
#include "transport/ucx/cma.h"
#include "transport/ucx/connection.h"
#include "transport/ucx/context.h"
#include "transport/ucx/sealed_bulk.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// The peer is told at once that it has more than this many bytes back.
constexpr uint64_t kMaxLazyBytes = 16u << 20;

uint64_t plainChunkCount(const std::vector<base::MutableSpan>& into) {
  uint64_t chunks = 0;
  for (const auto& span : into) {
    chunks += chunkCount(span.size);
  }
  return chunks;
}

} // namespace

void UcxConnection::fetch(
    uint64_t transfer,
    uint32_t first,
    const std::vector<BulkEntry>& from,
    const std::vector<base::MutableSpan>& into,
    Callback callback,
    Incoming::Arrived arrived) {
  // cmaUsable_ needs no lock: it was written once, before the first frame was
  // delivered.
  const bool readable = cmaUsable_ &&
      std::all_of(from.begin(), from.end(), [](const BulkEntry& entry) {
                          return entry.address != 0 || entry.size == 0;
                        });
  if (!readable) {
    pull(transfer, first, into, std::move(callback), std::move(arrived));
    return;
  }
  std::vector<uint64_t> addresses;
  addresses.reserve(from.size());
  for (const auto& entry : from) {
    addresses.push_back(entry.address);
  }
  cmaRead(
      peer_.process.pid,
      addresses,
      into,
      context_->runner(),
      [self = shared_from_this(), callback = std::move(callback)](
          const base::Error& error) { self->whenJudged(error, callback); });
}

bool UcxConnection::maps(const BulkEntry& entry) const {
  return cmaUsable_ && entry.region != 0;
}

std::shared_ptr<memory::SharedMap> UcxConnection::map(const BulkEntry& entry) {
  if (!maps(entry)) {
    return nullptr;
  }
  const int32_t pid = peer_.process.pid;
  return (entry.fd & kCommon) == 0
      ? context_->maps().map(pid, entry)
      : memory::SharedMap::open(
            pid,
            entry.fd & ~kCommon,
            entry.region,
            entry.size,
            /*isPrivate=*/true);
}

std::shared_ptr<memory::SharedMap> UcxConnection::takeBack(
    const BulkEntry& entry) {
  std::shared_ptr<memory::SharedMap> memory;
  worker().runLocked([&](Locked& locked) {
    memory = transfers_.takeBack(locked, entry.region, entry.size);
  });
  return memory;
}

void UcxConnection::pull(
    uint64_t transfer,
    uint32_t first,
    const std::vector<base::MutableSpan>& into,
    Callback callback,
    Incoming::Arrived arrived) {
  auto bulk = context_->bulk();
  if (!bulk.ok()) {
    callback(bulk.error());
    return;
  }
  PullRequest request;
  request.firstSpan = first;
  request.spanCount = static_cast<uint32_t>(into.size());
  request.bulkAddress = bulk.value()->address().to(nearness_);
  const bool sealed = !bulkReceiveKey_.empty();
  request.tag = bulk.value()->reserveTags(
      sealed ? sealedChunkCount(into) : plainChunkCount(into));
  // The receive may end before its id is known here, so the callback has a cell
  // that gets the id later.
  auto id = std::make_shared<std::atomic<uint64_t>>(0);
  auto self = shared_from_this();
  Callback ended =
      [self, id, callback = std::move(callback)](const base::Error& error) {
        self->worker().post(
            [self, id](Locked&) { self->pulls_.erase(id->load()); });
        self->whenJudged(error, callback);
      };
  const uint64_t receive = sealed
      ? receiveSealed(
            *bulk.value(),
            context_->runner(),
            bulkReceiveKey_,
            request.tag,
            into,
            std::move(ended))
      : bulk.value()->receive(
            request.tag, into, std::move(ended), std::move(arrived));
  id->store(receive);
  worker().post(
      [self, bulk = bulk.value(), receive, transfer, request](Locked& locked) {
        if (self->closed()) {
          locked.defer([bulk, receive, why = self->ending()] {
            bulk->cancel(receive, why);
          });
          return;
        }
        self->pulls_.emplace(receive, transfer);
        self->sendActive(
            locked,
            {.kind = FrameKind::kPull,
             .token = self->peer_.token,
             .transfer = transfer},
            encode(request));
      });
}

void UcxConnection::done(
    uint64_t transfer,
    uint64_t bytes,
    const base::Error& error) {
  worker().post(
      [self = shared_from_this(), transfer, bytes, error](Locked& locked) {
        if (!self->open()) {
          return;
        }
        if (!error && bytes <= kMaxLazyBytes) {
          // A message of its own would wake a thread of the peer for this
          // alone. The answer to the call is often on its way, and takes this
          // along.
          if ((transfer & kAdopted) != 0) {
            self->adopted_.push_back(transfer);
          } else {
            // If the peer has not yet been told that its memory was adopted, it
            // need only hear that the memory is its own again.
            std::erase(self->adopted_, (transfer & ~kForked) | kAdopted);
            self->acknowledgements_.push_back(transfer);
          }
          if (!std::exchange(self->acknowledgesSoon_, true)) {
            self->context_->acknowledgeSoon(locked, self);
          }
          return;
        }
        self->sendReason(locked, FrameKind::kDone, transfer, error);
      });
}

void UcxConnection::sendReason(
    Locked& locked,
    FrameKind kind,
    uint64_t transfer,
    const base::Error& error) {
  base::Buffer text(error ? std::min<size_t>(error.message.size(), 512) : 0);
  if (text.size() != 0) {
    std::memcpy(text.data(), error.message.data(), text.size());
  }
  sendActive(
      locked,
      {.kind = kind,
       .count = static_cast<uint32_t>(error.kind),
       .token = peer_.token,
       .transfer = transfer},
      std::move(text));
}

void UcxConnection::onPull(Locked& locked, uint64_t id, base::ConstSpan data) {
  auto request = parsePullRequest(data);
  const Transfers::Spans* const all = transfers_.find(locked, id);
  if (!request.ok() || all == nullptr) {
    fail(
        locked,
        {base::ErrorKind::kInvalid,
         "the peer asked for bulk that does not exist"});
    return;
  }
  const PullRequest& pull = request.value();
  if (pull.firstSpan > all->size() ||
      pull.spanCount > all->size() - pull.firstSpan) {
    fail(
        locked,
        {base::ErrorKind::kInvalid,
         "the peer asked for bulk spans that do not exist"});
    return;
  }
  if (!transfers_.sendBegins(locked, id)) {
    fail(
        locked,
        {base::ErrorKind::kInvalid, "the peer asked for the same bulk again"});
    return;
  }
  const auto begin = all->begin() + pull.firstSpan;
  locked.defer([self = shared_from_this(),
                id,
                pull,
                spans = Transfers::Spans(begin, begin + pull.spanCount)] {
    self->sendBulk(pull, spans, [self, id](const base::Error& failure) {
      self->whenJudged(failure, [self, id](const base::Error& error) {
        self->worker().post([self, id, error](Locked& later) {
          self->sendEnded(later, id, error);
        });
      });
    });
  });
}

void UcxConnection::sendBulk(
    const PullRequest& pull,
    const std::vector<BulkSpan>& spans,
    Callback callback) {
  auto bulk = context_->bulk();
  if (!bulk.ok()) {
    callback(bulk.error());
  } else if (!bulkSendKey_.empty()) {
    sendSealed(
        bulk.value(),
        context_->runner(),
        bulkSendKey_,
        pull,
        spans,
        std::move(callback));
  } else if (anyFilling(spans)) {
    sendAsFilled(
        bulk.value(),
        pull,
        spans,
        [self = shared_from_this()] { return self->closed(); },
        std::move(callback));
  } else {
    bulk.value()->send(
        pull.bulkAddress,
        pull.tag,
        {spans.begin(), spans.end()},
        std::move(callback));
  }
}

// UCX does not read the memory any more. If the send failed, the peer is told
// to stop waiting for the rest. The peer then answers the call with an error,
// and this answer must not overtake the real reason: so this end's callback
// gets that reason first.
void UcxConnection::sendEnded(
    Locked& locked,
    uint64_t id,
    const base::Error& error) {
  transfers_.sendEnds(locked, id, error); // defers the callback
  if (!error) {
    return;
  }
  locked.defer([self = shared_from_this(), id, error] {
    self->worker().post([self, id, error](Locked& later) {
      if (self->open()) {
        self->sendReason(later, FrameKind::kAbort, id, error);
      }
    });
  });
}

void UcxConnection::onAbort(
    Locked& locked,
    uint64_t transfer,
    const base::Error& why) {
  for (const auto& [id, of] : pulls_) {
    if (of == transfer) {
      locked.defer([self = shared_from_this(), id = id, why] {
        auto bulk = self->context_->bulk();
        if (bulk.ok()) {
          bulk.value()->cancel(id, why);
        }
      });
    }
  }
}

void UcxConnection::onDone(Locked& locked, uint64_t id, base::Error error) {
  const uint64_t number = id & ~(kAdopted | kForked);
  if ((id & kForked) != 0) {
    transfers_.forked(locked, number);
  }
  if ((id & kAdopted) != 0) {
    transfers_.adopted(locked, number);
  } else {
    transfers_.done(locked, number, std::move(error));
  }
}

} // namespace torch_rpc_ext::transport::ucx
