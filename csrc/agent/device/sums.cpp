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
  ++count_;
  const bool launched =
      launcher_->checksum(region, reinterpret_cast<uintptr_t>(sum));
  // Also if the launch failed: the device may have been told before to set the
  // sum to 0.
  keepFor(memory_, region.device());
  return launched ? sum : nullptr;
}

} // namespace torch_rpc_ext::agent::device
