#include "transport/ucx/incoming.h"

#include "base/boundary.h"
#include "base/fork.h"

#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

namespace {

// While a Lease lives, this process uses the sender's memory. A Lease may live
// longer than the connection, and longer than this worker's RPC. When a Lease
// dies in a forked child, the sender is not told, because the parent may still
// use the memory.
class Lease {
 public:
  Lease(std::weak_ptr<bulk::Exchange> bulk, uint64_t transfer)
      : bulk_(std::move(bulk)), transfer_(transfer) {}
  ~Lease() {
    if (!home_.isHere()) {
      return;
    }
    if (const auto bulk = bulk_.lock()) {
      const uint64_t ended = forked_.load() ? transfer_ | kForked : transfer_;
      const auto tell = [&] { bulk->done(ended, /*bytes=*/0, {}); };
      base::guarded(
          base::Boundary::kStorage, tell, [&](const base::Error&) { tell(); });
    }
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  void forked() {
    forked_.store(true);
  }

 private:
  const base::HomeProcess home_;
  const std::weak_ptr<bulk::Exchange> bulk_;
  const uint64_t transfer_;
  std::atomic<bool> forked_{false};
};

// A frame that has arrived over a UcxConnection.
//
// Owns: the bytes of the frame: the table of its spans, carried bulk, and the
//   head, which starts at `headOffset`.
class UcxIncoming final : public Incoming {
 public:
  UcxIncoming(
      std::shared_ptr<bulk::Exchange> bulk,
      uint64_t transfer,
      uint32_t firstSpan,
      std::vector<BulkEntry> entries,
      base::Buffer bytes,
      size_t headOffset)
      : bulk_(std::move(bulk)),
        transfer_(transfer),
        firstSpan_(firstSpan),
        entries_(std::move(entries)),
        bytes_(std::move(bytes)),
        headOffset_(headOffset) {
    sizes_.reserve(entries_.size());
    for (const auto& entry : entries_) {
      sizes_.push_back(entry.size);
    }
  }
  ~UcxIncoming() override {
    if (!answered_) {
      const auto tell = [this] {
        refuse(
            entries_.empty() ? base::Error{}
                             : base::Error{
                                   base::ErrorKind::kRefused,
                                   "the receiver did not take the message"});
      };
      base::guarded(
          base::Boundary::kStorage, tell, [&](const base::Error&) { tell(); });
    }
  }

  base::ConstSpan head() const override {
    return {bytes_.data() + headOffset_, bytes_.size() - headOffset_};
  }
  const std::vector<uint64_t>& bulkSizes() const override {
    return sizes_;
  }
  uint64_t bytesToCopy() const override {
    uint64_t bytes = 0;
    for (const BulkEntry& entry : entries_) {
      bytes += bulk_->maps(entry) ? 0 : entry.size;
    }
    return bytes;
  }
  void refuse(const base::Error& why) override {
    answered_ = true;
    if (transfer_ != 0) {
      bulk_->done(transfer_, /*bytes=*/0, why);
    }
  }
  std::shared_ptr<memory::SharedMap> map(size_t index) override;
  void receive(
      std::vector<base::MutableSpan> into,
      Callback callback,
      Arrived arrived) override;

 private:
  const std::shared_ptr<bulk::Exchange> bulk_;
  const uint64_t transfer_; // 0: the sender lends no memory
  const uint32_t firstSpan_;
  const std::vector<BulkEntry> entries_;
  const base::Buffer bytes_;
  const size_t headOffset_;
  std::vector<uint64_t> sizes_;
  bool answered_ = false;
  std::shared_ptr<Lease> lease_; // null until a span is mapped
};

std::shared_ptr<memory::SharedMap> UcxIncoming::map(size_t index) {
  auto memory = bulk_->map(entries_[index]);
  if (memory == nullptr || !memory->isForeign()) {
    return memory; // null, or memory of this process, which has it back
  }
  if (lease_ == nullptr) {
    lease_ = std::make_shared<Lease>(bulk_, transfer_);
  }
  struct Leased {
    std::shared_ptr<Lease> lease;
    std::shared_ptr<memory::SharedMap> map; // destroyed before the lease

    ~Leased() {
      if (map->discarded()) {
        lease->forked();
      }
    }
  };
  const std::shared_ptr<Leased> leased(new Leased{lease_, std::move(memory)});
  return {leased, leased->map.get()};
}

void UcxIncoming::receive(
    std::vector<base::MutableSpan> into,
    Callback callback,
    Arrived arrived) {
  answered_ = true;
  uint64_t bytes = bytes_.size();
  bulk::Fetch fetch{.transfer = transfer_, .firstSpan = firstSpan_};
  fetch.from.reserve(entries_.size());
  fetch.into.reserve(into.size());
  const std::byte* carried =
      bytes_.data() + entries_.size() * sizeof(BulkEntry);
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (isCarried(entries_[i])) {
      if (into[i].data != nullptr && into[i].size != 0) {
        std::memcpy(into[i].data, carried, into[i].size);
      }
      carried += entries_[i].size;
    } else if (into[i].data != nullptr || into[i].size == 0) {
      fetch.from.push_back(entries_[i]);
      fetch.into.push_back(into[i]);
      bytes += entries_[i].size;
    }
  }
  // `callback` may destroy *this. It comes first: once the sender has the
  // acknowledgement, the sender may close the connection.
  fetch.callback = [bulk = bulk_,
                    transfer = transfer_,
                    bytes,
                    lease = lease_,
                    callback = std::move(callback)](const base::Error& error) {
    callback(error);
    if (transfer != 0) {
      const bool keeps = !error && lease != nullptr;
      bulk->done(keeps ? transfer | kKept : transfer, bytes, error);
    }
  };
  if (fetch.from.empty()) {
    const Callback done = std::move(fetch.callback);
    done({});
    return;
  }
  fetch.arrived = std::move(arrived);
  bulk_->fetch(std::move(fetch));
}

} // namespace

base::Result<std::unique_ptr<Incoming>> makeIncoming(
    std::shared_ptr<bulk::Exchange> bulk,
    uint64_t transfer,
    uint32_t firstSpan,
    uint32_t count,
    base::Buffer data,
    uint64_t maxBytes) {
  auto entries = parseBulkEntries({data.data(), data.size()}, count);
  if (!entries.ok()) {
    return entries.error();
  }
  uint64_t total = data.size();
  size_t headOffset = count * sizeof(BulkEntry);
  for (const auto& entry : entries.value()) {
    if (isCarried(entry)) {
      if (entry.size > data.size() - headOffset) {
        return base::Error{
            base::ErrorKind::kInvalid,
            "a frame carries less bulk than its table says"};
      }
      headOffset += entry.size;
    } else if (__builtin_add_overflow(total, entry.size, &total)) {
      return base::Error{
          base::ErrorKind::kInvalid, "the bulk sizes of a frame overflow"};
    }
  }
  if (maxBytes != 0 && total > maxBytes) {
    return base::Error{
        base::ErrorKind::kRefused,
        "the message has " + std::to_string(total) +
            " bytes, the receiver takes at most " + std::to_string(maxBytes) +
            " (option max_message_bytes)"};
  }
  return std::unique_ptr<Incoming>(std::make_unique<UcxIncoming>(
      std::move(bulk),
      transfer,
      firstSpan,
      std::move(entries.value()),
      std::move(data),
      headOffset));
}

} // namespace torch_rpc_ext::transport::ucx
