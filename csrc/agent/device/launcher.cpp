#include "agent/device/launcher.h"

#include "base/log.h"
#include "compat/stream_handle.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_rpc_ext::agent::device {

namespace {

constexpr const char* kChecksum = "checksum";

std::optional<cuda::StreamHandle> currentHandle(c10::Device device) {
  const auto handle = compat::nativeHandle(
      c10::impl::VirtualGuardImpl(kType).getStream(device));
  if (!handle) {
    return std::nullopt;
  }
  return static_cast<cuda::StreamHandle>(*handle);
}

void logChoice(
    c10::Device device,
    const std::string& kernel,
    const base::Error& why) {
  const std::string what = device.str() + ": kernel " + kernel;
  if (!why) {
    base::log(base::LogLevel::kInfo, what + " is launched");
    return;
  }
  // Not to install numba-cuda is the user's choice, so no warning for that.
  base::log(
      why.kind == base::ErrorKind::kUnsupported ? base::LogLevel::kDebug
                                                : base::LogLevel::kWarning,
      what + " is not used, torch does its work: " + why.message);
}

} // namespace

bool Launcher::segments(
    c10::Device device,
    std::span<const cuda::Segment> runs,
    cuda::Cast cast) {
  cuda::Kernels* const kernels = kernelsFor(device, cuda::segmentsName(cast));
  if (kernels == nullptr) {
    return false;
  }
  const auto stream = currentHandle(device);
  // After an error here torch does the work: torch may have the memory that was
  // lacking here, or raises an error that says what is wrong with the device.
  return stream && !kernels->segments(device.index(), *stream, runs, cast);
}

bool Launcher::strided(
    c10::Device device,
    const cuda::Layout& source,
    const cuda::Layout& destination,
    cuda::Cast cast) {
  auto plan = cuda::planStrided(source, destination, cast);
  if (!plan.ok()) {
    return false; // too many dimensions, or elements that are not aligned
  }
  cuda::Kernels* const kernels =
      kernelsFor(device, cuda::stridedName(plan.value(), cast));
  if (kernels == nullptr) {
    return false;
  }
  const auto stream = currentHandle(device);
  return stream &&
      !kernels->strided(device.index(), *stream, plan.value(), cast);
}

bool Launcher::hasChecksum(c10::Device device) {
  return kernelsFor(device, kChecksum) != nullptr;
}

bool Launcher::checksum(const Region& region, cuda::Address sum) {
  const c10::Device device = region.device();
  cuda::Kernels* const kernels = kernelsFor(device, kChecksum);
  if (kernels == nullptr) {
    return false;
  }
  const auto stream = currentHandle(device);
  return stream &&
      !kernels->checksum(
          device.index(), *stream, region.address(), region.bytes, sum);
}

cuda::Kernels* Launcher::kernelsFor(
    c10::Device device,
    const std::string& kernel) {
  if (!source_) {
    return nullptr;
  }
  const std::pair key(device.index(), kernel);
  {
    std::lock_guard lock(mutex_);
    const auto known = usable_.find(key);
    if (known != usable_.end()) {
      return known->second ? kernels_.get() : nullptr;
    }
  }
  // Not under the mutex, because find() takes the GIL. Two threads may do this
  // at once.
  const bool usable = find(device, kernel);
  std::lock_guard lock(mutex_);
  usable_.emplace(key, usable);
  return usable ? kernels_.get() : nullptr;
}

cuda::Kernels* Launcher::loaded() {
  std::lock_guard lock(mutex_);
  if (!tried_) {
    tried_ = true;
    auto driver = cuda::Driver::load();
    if (driver.ok()) {
      kernels_ = std::make_unique<cuda::Kernels>(driver.value(), source_);
    } else {
      base::log(
          base::LogLevel::kInfo,
          "torch copies and casts on CUDA devices, not our kernels: " +
              driver.error().message);
    }
  }
  return kernels_.get();
}

bool Launcher::find(c10::Device device, const std::string& kernel) {
  cuda::Kernels* const kernels = loaded();
  if (kernels == nullptr) {
    return false;
  }
  base::Error why;
  if (!currentHandle(device)) {
    why = {
        base::ErrorKind::kSystem,
        "this version of torch does not tell the handles of its streams"};
  } else {
    why = kernels->prepare(device.index(), kernel);
  }
  logChoice(device, kernel, why);
  return !why;
}

} // namespace torch_rpc_ext::agent::device
