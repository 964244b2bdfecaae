#include "agent/device/launcher.h"

#include "base/log.h"

namespace torch_rpc_ext::agent::device {

namespace {

constexpr const char* kChecksum = "checksum";

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
  auto stream = currentHandle(device);
  // After an error here torch does the work: torch may have the memory that was
  // lacking here, or raises an error that says what is wrong with the device.
  return stream.ok() &&
      !kernels->segments(device.index(), stream.value(), runs, cast);
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
  auto stream = currentHandle(device);
  return stream.ok() &&
      !kernels->strided(device.index(), stream.value(), plan.value(), cast);
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
  auto stream = currentHandle(device);
  return stream.ok() &&
      !kernels->checksum(
          device.index(), stream.value(), region.address(), region.bytes, sum);
}

cuda::Kernels* Launcher::kernelsFor(
    c10::Device device,
    const std::string& kernel) {
  if (!source_) {
    return nullptr;
  }
  const Key key(device.index(), kernel);
  {
    const auto state = state_.lock();
    const auto known = state->outcomes.find(key);
    // After kOverloaded there may be memory this time.
    if (known != state->outcomes.end() &&
        known->second != base::ErrorKind::kOverloaded) {
      return known->second == base::ErrorKind::kNone ? state->kernels.get()
                                                     : nullptr;
    }
  }
  cuda::Kernels* const kernels = loaded();
  if (kernels == nullptr) {
    return nullptr;
  }
  // Not under the mutex, because prepare() takes the GIL. Two threads may do
  // this at once.
  const auto stream = currentHandle(device);
  // kSystem, because logChoice() takes kUnsupported for the user's choice.
  const base::Error why = stream.ok()
      ? kernels->prepare(device.index(), kernel)
      : base::Error(base::ErrorKind::kSystem, stream.error().message);
  auto state = state_.lock();
  const auto [outcome, isNew] = state->outcomes.try_emplace(key, why.kind);
  const auto before = std::exchange(outcome->second, why.kind);
  state.unlock();
  if (isNew || before != why.kind) {
    logChoice(device, kernel, why);
  }
  return why ? nullptr : kernels;
}

cuda::Kernels* Launcher::loaded() {
  auto state = state_.lock();
  if (!state->tried) {
    state->tried = true;
    auto driver = cuda::Driver::load();
    if (driver.ok()) {
      state->kernels = std::make_unique<cuda::Kernels>(driver.value(), source_);
    } else {
      base::log(
          base::LogLevel::kInfo,
          "torch copies and casts on CUDA devices, not our kernels: " +
              driver.error().message);
    }
  }
  return state->kernels.get();
}

} // namespace torch_rpc_ext::agent::device
