// The codec's checksums: computes those that are sent, compares those that
// arrive.

#include "agent/codec.h"
#include "base/checksum.h"

namespace torch_rpc_ext::agent {

using base::Error;

std::vector<uint64_t> Encoder::sumsOf(const wire::CallFrame& frame) const {
  if (!options_.checked) {
    return {};
  }
  std::vector<uint64_t> sums{base::checksum(frame.payload)};
  auto computed = staged_.sums.begin(); // by the device, in storage order
  for (const wire::StorageEntry& storage : frame.storages) {
    if (computed != staged_.sums.end() && computed->entry == &storage) {
      sums.push_back(*computed++->sum);
    } else {
      const bool travels = storage.bulk || storage.isInline();
      sums.push_back(travels ? base::checksum(storage.bytes) : 0);
    }
  }
  return sums;
}

// Whether the checksum of a storage is compared on its device, later. In a
// message with sparse tensors none is: such tensors are checked on the host
// before they are built, so their bytes have to be right there.
bool Decoder::isSummedLater(
    const wire::StorageView& storage,
    device::Launcher* launcher) const {
  return storage.bulk && wire::isOnDevice(storage.place) &&
      launcher != nullptr && view_.recordCount() == view_.tensorCount() &&
      launcher->hasChecksum(device::deviceAt(storage.place));
}

Error Decoder::compareLater(
    const device::Unstaged& placed,
    const std::vector<device::Arriving>& arriving,
    const std::vector<size_t>& arrivingAt,
    device::Launcher* launcher) {
  if (!view_.hasSums()) {
    return {};
  }
  std::vector<wire::StorageView> views(view_.storageCount());
  auto cursor = view_.storages();
  for (auto& view : views) {
    cursor.next(view);
  }
  for (const auto& [index, device, host, sum] : placed.sums) {
    const base::ConstSpan bytes{host.data(), host.nbytes()};
    if (!index) {
      if (sum != nullptr) {
        pending_.addBlock(device, bytes.size, sum, base::checksum(bytes));
      }
      continue;
    }
    const auto number = static_cast<uint32_t>(arrivingAt[*index]);
    const wire::StorageView& storage = views[number];
    if (sum != nullptr) {
      pending_.add(view_, number, bytes.size, sum, storage.sum);
    } else if (isSummedLater(storage, launcher)) { // the launch has failed
      if (auto error = checkSum(view_, number, bytes, storage.sum)) {
        return error;
      }
    }
  }
  return {};
}

void Decoder::compareLater(
    const device::Arrived& arrived,
    const std::vector<device::Expected>& expected,
    const std::vector<size_t>& places) {
  for (const device::Arrived::Sum& sum : arrived.sums) {
    const uint32_t first = sum.storages.front();
    if (sum.storages.size() == 1) {
      const auto number = static_cast<uint32_t>(places[first]);
      pending_.add(view_, number, sum.bytes, sum.here, sum.sent);
    } else {
      pending_.addBlock(expected[first].device, sum.bytes, sum.here, sum.sent);
    }
  }
  for (const c10::Storage& memory : arrived.held) {
    pending_.hold(memory);
  }
}

} // namespace torch_rpc_ext::agent
