#include "agent/device/sums.h"

#include "agent/device/staging.h"

namespace torch_rpc_ext::agent::device {

const uint64_t* Sums::add(const Region& region) {
  if (launcher_ == nullptr || count_ == most_ ||
      !launcher_->hasChecksum(region.device())) {
    return nullptr;
  }
  if (!memory_) {
    memory_ = pinned(most_ * sizeof(uint64_t));
  }
  auto* const sum = static_cast<uint64_t*>(memory_.mutable_data()) + count_;
  if (!launcher_->checksum(region, reinterpret_cast<uintptr_t>(sum))) {
    return nullptr;
  }
  ++count_;
  keepFor(memory_, region.device());
  return sum;
}

} // namespace torch_rpc_ext::agent::device
