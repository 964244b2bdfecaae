#include "transport/ucx/incoming.h"

namespace torch_rpc_ext::transport::ucx {

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
    refuse(
        entries_.empty() ? base::Error{}
                         : base::Error{
                               base::ErrorKind::kRefused,
                               "the receiver did not take the message"});
  }
}

void UcxIncoming::refuse(const base::Error& why) {
  answered_ = true;
  if (transfer_ != 0) {
    connection_->done(transfer_, /*bytes=*/0, why);
  }
}

void UcxIncoming::receive(
    std::vector<base::MutableSpan> into,
    Callback callback) {
  answered_ = true;
  if (entries_.empty()) {
    if (transfer_ != 0) {
      connection_->done(transfer_, bytes_.size(), {});
    }
    callback({});
    return;
  }
  uint64_t bytes = bytes_.size();
  for (const uint64_t size : sizes_) {
    bytes += size;
  }
  connection_->fetch(
      transfer_,
      firstSpan_,
      entries_,
      into,
      [connection = connection_,
       transfer = transfer_,
       bytes,
       callback = std::move(callback)](base::Error error) {
        if (!error && connection->closed()) {
          // The sender may have let go of the memory while it was read.
          error = {
              base::ErrorKind::kPeerLost,
              "the connection ended while a message was on its way"};
        }
        // The owner first: once the sender knows, it may close.
        callback(error);
        connection->done(transfer, bytes, error);
      });
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
