#include "transport/ucx/incoming.h"

#include "base/boundary.h"
#include "base/fork.h"

#include <atomic>

namespace torch_rpc_ext::transport::ucx {

// While a Lease lives, this process uses the sender's memory. A Lease may live
// longer than the connection, and longer than this worker's RPC. When a Lease
// dies in a forked child, the sender is not told, because the parent may still
// use the memory.
class UcxIncoming::Lease {
 public:
  Lease(std::weak_ptr<UcxConnection> connection, uint64_t transfer)
      : connection_(std::move(connection)), transfer_(transfer) {}
  ~Lease() {
    if (!home_.isHere()) {
      return;
    }
    if (auto connection = connection_.lock()) {
      const uint64_t ended = forked_.load() ? transfer_ | kForked : transfer_;
      const auto tell = [&] { connection->done(ended, /*bytes=*/0, {}); };
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
  const std::weak_ptr<UcxConnection> connection_;
  const uint64_t transfer_;
  std::atomic<bool> forked_{false};
};

UcxIncoming::UcxIncoming(
    std::shared_ptr<UcxConnection> connection,
    uint64_t transfer,
    uint32_t firstSpan,
    std::vector<BulkEntry> entries,
    base::Buffer bytes,
    size_t headOffset)
    : connection_(std::move(connection)),
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

UcxIncoming::~UcxIncoming() {
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

uint64_t UcxIncoming::bytesToCopy() const {
  uint64_t bytes = 0;
  for (const BulkEntry& entry : entries_) {
    bytes += connection_->maps(entry) ? 0 : entry.size;
  }
  return bytes;
}

void UcxIncoming::refuse(const base::Error& why) {
  answered_ = true;
  if (transfer_ != 0) {
    connection_->done(transfer_, /*bytes=*/0, why);
  }
}

Adopted UcxIncoming::adopt(size_t index) {
  const BulkEntry& entry = entries_[index];
  if (entry.fd == kReturned) {
    return {.memory = connection_->takeBack(entry)};
  }
  auto memory = connection_->map(entry);
  if (memory == nullptr) {
    return {};
  }
  if (lease_ == nullptr) {
    lease_ = std::make_shared<Lease>(connection_, transfer_);
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
  const bool isReturnable = !leased->map->isPrivate();
  return {
      {leased, leased->map.get()},
      entry.region,
      isReturnable ? connection_ : nullptr};
}

void UcxIncoming::receive(
    std::vector<base::MutableSpan> into,
    Callback callback,
    Arrived arrived) {
  answered_ = true;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].fd == kReturned && into[i].data != nullptr) {
      const base::Error error{
          base::ErrorKind::kInvalid,
          "the sender returns memory that it has not been sent"};
      const auto connection = connection_;
      callback(error); // the callback may destroy *this
      connection->done(transfer_, 0, error);
      return;
    }
  }
  const uint64_t transfer =
      lease_ == nullptr ? transfer_ : transfer_ | kAdopted;
  uint64_t bytes = bytes_.size();
  std::vector<BulkEntry> entries;
  std::vector<base::MutableSpan> spans;
  entries.reserve(entries_.size());
  spans.reserve(into.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (into[i].data != nullptr || into[i].size == 0) {
      entries.push_back(entries_[i]);
      spans.push_back(into[i]);
      bytes += entries_[i].size;
    }
  }
  if (entries.empty()) {
    const bool answers = transfer_ != 0;
    const auto connection = connection_;
    callback({}); // the callback may destroy *this
    if (answers) {
      connection->done(transfer, bytes, {});
    }
    return;
  }
  connection_->fetch(
      transfer_,
      firstSpan_,
      entries,
      spans,
      [connection = connection_,
       transfer,
       bytes,
       lease = lease_,
       callback = std::move(callback)](base::Error error) {
        if (!error && connection->closed()) {
          // The sender may have reused the memory while this process read it,
          // so the bytes cannot be trusted.
          error = connection->ending();
        }
        // The callback comes first: once the sender has the acknowledgement,
        // the sender may close the connection.
        callback(error);
        connection->done(error ? transfer & ~kAdopted : transfer, bytes, error);
      },
      std::move(arrived));
}

base::Result<std::unique_ptr<Incoming>> makeIncoming(
    const std::shared_ptr<UcxConnection>& connection,
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
  for (const auto& entry : entries.value()) {
    if (__builtin_add_overflow(total, entry.size, &total)) {
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
  const size_t headOffset = count * sizeof(BulkEntry);
  return std::unique_ptr<Incoming>(std::make_unique<UcxIncoming>(
      connection,
      transfer,
      firstSpan,
      std::move(entries.value()),
      std::move(data),
      headOffset));
}

} // namespace torch_rpc_ext::transport::ucx
