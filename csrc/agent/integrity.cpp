#include "agent/integrity.h"

#include "base/checksum.h"

#include <array>
#include <cinttypes>
#include <cstdio>
#include <string>

namespace torch_rpc_ext::agent {

namespace {

std::string inHex(uint64_t sum) {
  std::array<char, 19> text{};
  std::snprintf(text.data(), text.size(), "0x%016" PRIx64, sum);
  return text.data();
}

// The first tensor of the message that has elements in the storage.
std::string tensorOver(const wire::CallFrameView& frame, uint32_t storage) {
  wire::TensorView record;
  int64_t tensor = -1;
  uint32_t parts = 0; // how many parts of the tensor are still to come
  for (auto cursor = frame.records(); cursor.next(record);) {
    if (parts == 0) {
      ++tensor;
      parts = wire::partsOf(record.layout);
    } else {
      --parts;
    }
    if (record.layout == wire::TensorLayout::kStrided &&
        record.aux == storage) {
      return "tensor " + std::to_string(tensor);
    }
  }
  return "storage " + std::to_string(storage);
}

base::Error changed(
    const std::string& what,
    uint64_t size,
    uint64_t here,
    const std::string& where,
    uint64_t there) {
  return {
      base::ErrorKind::kCorrupted,
      what + " of the message " + kChangedOnTheWay + ": its " +
          std::to_string(size) + " bytes have the checksum " + inHex(here) +
          " here and had " + inHex(there) + " " + where};
}

constexpr const char* kAtSender = "at the sender";

} // namespace

base::Error checkSums(
    const wire::CallFrameView& frame,
    base::ConstSpan payload,
    c10::ArrayRef<c10::Storage> bulk,
    const std::function<bool(const wire::StorageView&)>& isLater) {
  if (!frame.hasSums()) {
    return {};
  }
  const uint64_t sum = base::checksum(payload);
  if (sum != frame.payloadSum()) {
    return changed(
        "the payload", payload.size, sum, kAtSender, frame.payloadSum());
  }
  wire::StorageView storage;
  auto cursor = frame.storages();
  size_t next = 0;
  for (uint32_t i = 0; cursor.next(storage); ++i) {
    if (storage.beside || storage.place == wire::kMetaPlace) {
      continue;
    }
    base::ConstSpan bytes = storage.bytes;
    if (storage.bulk) {
      bytes = {bulk[next].data(), bulk[next].nbytes()};
      ++next;
    }
    if (isLater(storage)) {
      continue;
    }
    if (auto error = checkSum(frame, i, bytes, storage.sum)) {
      return error;
    }
  }
  return {};
}

base::Error checkSum(
    const wire::CallFrameView& frame,
    uint32_t storage,
    base::ConstSpan bytes,
    uint64_t sent) {
  const uint64_t here = base::checksum(bytes);
  return here == sent
      ? base::Error()
      : changed(tensorOver(frame, storage), bytes.size, here, kAtSender, sent);
}

void PendingSums::add(
    const wire::CallFrameView& frame,
    uint32_t storage,
    uint64_t bytes,
    const uint64_t* here,
    Other sent) {
  // The text is made now because the frame may be gone when the sums are
  // compared.
  sums_.push_back({tensorOver(frame, storage), kAtSender, bytes, here, sent});
}

void PendingSums::addBlock(
    c10::Device to,
    uint64_t bytes,
    const uint64_t* here,
    Other there) {
  const bool fromHost = std::holds_alternative<uint64_t>(there);
  sums_.push_back(
      {"a block of small tensors for " + to.str(),
       fromHost ? "before it was copied there" : kAtSender,
       bytes,
       here,
       there});
}

base::Error PendingSums::compare() const {
  for (const Sum& sum : sums_) {
    const auto* const later = std::get_if<const uint64_t*>(&sum.there);
    const uint64_t there =
        later != nullptr ? **later : std::get<uint64_t>(sum.there);
    if (*sum.here != there) {
      return changed(sum.what, sum.bytes, *sum.here, sum.where, there);
    }
  }
  return {};
}

} // namespace torch_rpc_ext::agent
