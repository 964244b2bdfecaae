#include "transport/ucx/incoming.h"

#include "base/boundary.h"
#include "base/fork.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
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

// The parts of a frame.
struct Parts {
  std::vector<BulkEntry> entries;
  base::Buffer carried = {}; // bulk that has come in the frame, in order
  base::Buffer bytes; // the rest, which ends with the head
  size_t headOffset = 0; // in `bytes`
};

// A frame that has arrived over a UcxConnection.
//
// Owns: the bytes of the frame.
class UcxIncoming final : public Incoming {
 public:
  UcxIncoming(
      std::shared_ptr<bulk::Exchange> bulk,
      uint64_t transfer,
      uint32_t firstSpan,
      Parts parts)
      : bulk_(std::move(bulk)),
        transfer_(transfer),
        firstSpan_(firstSpan),
        entries_(std::move(parts.entries)),
        carried_(std::move(parts.carried)),
        bytes_(std::move(parts.bytes)),
        headOffset_(parts.headOffset) {
    sizes_.reserve(entries_.size());
    for (const auto& entry : entries_) {
      sizes_.push_back(entry.size);
    }
  }
  ~UcxIncoming() override {
    dropCarried();
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
    dropCarried();
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
  // Frees the carried bulk: the message may wait for long until a thread serves
  // it, and from here on only its head is needed.
  void dropCarried() {
    const size_t bytes = carried_.size();
    carried_ = {};
    bulk_->carried().copied(bytes);
  }

  const std::shared_ptr<bulk::Exchange> bulk_;
  const uint64_t transfer_; // 0: the sender lends no memory
  const uint32_t firstSpan_;
  const std::vector<BulkEntry> entries_;
  base::Buffer carried_;
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
  uint64_t bytes = bytes_.size();
  bulk::Fetch fetch{.transfer = transfer_, .firstSpan = firstSpan_};
  const std::byte* carried = carried_.data();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const BulkEntry& entry = entries_[i];
    if (isCarried(entry)) {
      if (into[i].data != nullptr && entry.size != 0) {
        std::memcpy(into[i].data, carried, entry.size);
      }
      carried += entry.size;
    } else if (into[i].data != nullptr || into[i].size == 0) {
      fetch.from.push_back(entry);
      fetch.into.push_back(into[i]);
      bytes += entry.size;
    }
  }
  dropCarried();
  answered_ = true;
  // `callback` may destroy *this. `callback` runs before done(): once the
  // sender has the acknowledgement, the sender may close the connection.
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

// Checks the sizes of a frame and of its bulk. Puts into `carried` how many
// bytes of bulk are in the frame.
base::Error check(
    const std::vector<BulkEntry>& entries,
    size_t frameBytes,
    uint64_t maxBytes,
    size_t& carried) {
  uint64_t total = frameBytes;
  size_t left = frameBytes - entries.size() * sizeof(BulkEntry);
  for (const BulkEntry& entry : entries) {
    if (isCarried(entry)) {
      if (entry.size > left) {
        return {
            base::ErrorKind::kInvalid,
            "a frame carries less bulk than its table says"};
      }
      left -= entry.size;
      carried += entry.size;
    } else if (__builtin_add_overflow(total, entry.size, &total)) {
      return {base::ErrorKind::kInvalid, "the bulk sizes of a frame overflow"};
    }
  }
  if (maxBytes != 0 && total > maxBytes) {
    return {
        base::ErrorKind::kRefused,
        "the message has " + std::to_string(total) +
            " bytes, the receiver takes at most " + std::to_string(maxBytes) +
            " (option max_message_bytes)"};
  }
  return {};
}

} // namespace

base::Result<std::unique_ptr<Incoming>> makeIncoming(
    Locked& locked,
    std::shared_ptr<bulk::Exchange> bulk,
    uint64_t transfer,
    uint32_t count,
    base::ConstSpan data,
    uint64_t maxBytes) {
  auto entries = parseBulkEntries(data, count);
  if (!entries.ok()) {
    return entries.error();
  }
  size_t carried = 0;
  // A frame without a transfer has no bulk (parseHeader()), so it is small, and
  // its sender could not be told that it is refused.
  const uint64_t limit = transfer == 0 ? 0 : maxBytes;
  if (auto error = check(entries.value(), data.size, limit, carried)) {
    return error;
  }
  const auto* const behindTable =
      static_cast<const std::byte*>(data.data) + count * sizeof(BulkEntry);
  const size_t headBytes = data.size - count * sizeof(BulkEntry) - carried;
  Parts parts{
      .entries = std::move(entries.value()),
      .carried = base::copyOf({behindTable, carried}),
      .bytes = base::copyOf({behindTable + carried, headBytes})};
  if (!bulk->carried().arrive(locked, carried)) {
    bulk->carried().copied(carried);
    return base::Error{
        base::ErrorKind::kInvalid,
        "the peer sends more bulk in frames than it may"};
  }
  return std::unique_ptr<Incoming>(std::make_unique<UcxIncoming>(
      std::move(bulk), transfer, /*firstSpan=*/0, std::move(parts)));
}

base::Result<std::unique_ptr<Incoming>> makeBigIncoming(
    std::shared_ptr<bulk::Exchange> bulk,
    uint64_t transfer,
    uint32_t count,
    base::Buffer frame,
    uint64_t maxBytes) {
  auto entries = parseBulkEntries({frame.data(), frame.size()}, count);
  if (!entries.ok()) {
    return entries.error();
  }
  size_t carried = 0;
  if (auto error = check(entries.value(), frame.size(), maxBytes, carried)) {
    return error;
  }
  if (std::any_of(entries.value().begin(), entries.value().end(), isCarried)) {
    return base::Error{
        base::ErrorKind::kInvalid, "a frame that is fetched carries bulk"};
  }
  Parts parts{
      .entries = std::move(entries.value()),
      .bytes = std::move(frame),
      .headOffset = count * sizeof(BulkEntry)};
  return std::unique_ptr<Incoming>(std::make_unique<UcxIncoming>(
      std::move(bulk), transfer, /*firstSpan=*/1, std::move(parts)));
}

} // namespace torch_rpc_ext::transport::ucx
