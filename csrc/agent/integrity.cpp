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
  uint32_t parts = 0; // of the tensor that are still to come
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

base::Error
changed(const std::string& what, uint64_t size, uint64_t here, uint64_t sent) {
  return {
      base::ErrorKind::kCorrupted,
      what + " of the message " + kChangedOnTheWay + ": its " +
          std::to_string(size) + " bytes have the checksum " + inHex(here) +
          " here and had " + inHex(sent) + " at the sender"};
}

} // namespace

base::Error checkSums(
    const wire::CallFrameView& frame,
    base::ConstSpan payload,
    c10::ArrayRef<c10::Storage> bulk) {
  if (!frame.hasSums()) {
    return {};
  }
  const uint64_t sum = base::checksum(payload);
  if (sum != frame.payloadSum()) {
    return changed("the payload", payload.size, sum, frame.payloadSum());
  }
  wire::StorageView storage;
  auto cursor = frame.storages();
  size_t next = 0;
  for (uint32_t i = 0; cursor.next(storage); ++i) {
    if (storage.beside) {
      continue;
    }
    base::ConstSpan bytes = storage.bytes;
    if (storage.bulk) {
      bytes = {bulk[next].data(), bulk[next].nbytes()};
      ++next;
    }
    const uint64_t here = base::checksum(bytes);
    if (here != storage.sum) {
      return changed(tensorOver(frame, i), bytes.size, here, storage.sum);
    }
  }
  return {};
}

} // namespace torch_rpc_ext::agent
