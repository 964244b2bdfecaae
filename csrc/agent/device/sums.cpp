#include "agent/device/sums.h"

#include "agent/device/staging.h"

// A warning of GCC that is torch's business.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Winterference-size"
#include <ATen/core/CachingHostAllocator.h>
#pragma GCC diagnostic pop
#include <c10/core/impl/VirtualGuardImpl.h>

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
  // Torch does not know that a device writes there.
  const auto& memory = memory_.data_ptr();
  at::getHostAllocator(kType)->record_event(
      memory.get(),
      memory.get_context(),
      c10::impl::VirtualGuardImpl(kType).getStream(region.device()));
  return sum;
}

} // namespace torch_rpc_ext::agent::device
