#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>

namespace torch_rpc_ext::cuda {

namespace {

constexpr const char* kDefaultLibrary = "libcuda.so.1";

base::Error unsupported(std::string text) {
  return {base::ErrorKind::kUnsupported, std::move(text)};
}

base::Result<DriverApi> openLibrary(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return unsupported(
        "there is no CUDA driver here: " +
        std::string(why != nullptr ? why : library));
  }
  DriverApi api;
  std::string missing;
#define TORCH_RPC_EXT_CUDA_FIND(member, symbol, parameters)                    \
  api.member = reinterpret_cast<decltype(api.member)>(dlsym(handle, #symbol)); \
  if (api.member == nullptr && missing.empty()) {                              \
    missing = #symbol;                                                         \
  }
  TORCH_RPC_EXT_CUDA_FUNCTIONS(TORCH_RPC_EXT_CUDA_FIND)
#undef TORCH_RPC_EXT_CUDA_FIND
  if (!missing.empty()) {
    return unsupported(
        "the CUDA driver " + library + " lacks " + missing +
        ": update it to one of CUDA 12 or later");
  }
  return api;
}

// What the caller can do about a failed call.
base::ErrorKind kindOf(Status status) {
  switch (status) {
    case status::kOutOfMemory:
      return base::ErrorKind::kOverloaded;
    case status::kDeinitialized:
      return base::ErrorKind::kShutDown;
    case status::kNoDevice:
    case status::kInvalidDevice:
    case status::kPeerAccessUnsupported:
    case status::kUnsupportedPtxVersion:
    case status::kNotPermitted:
    case status::kNotSupported:
    case status::kSystemNotReady:
    case status::kSystemDriverMismatch:
      return base::ErrorKind::kUnsupported;
    default:
      return base::ErrorKind::kSystem;
  }
}

} // namespace

base::Result<std::shared_ptr<Driver>> Driver::load() {
  const char* library = std::getenv("TORCH_RPC_EXT_LIBCUDA");
  const bool isSet = library != nullptr && *library != '\0';
  return load(isSet ? library : kDefaultLibrary);
}

base::Result<std::shared_ptr<Driver>> Driver::load(const std::string& library) {
  auto api = openLibrary(library);
  if (!api.ok()) {
    return api.error();
  }
  std::shared_ptr<Driver> driver(new Driver(api.value()));
  if (auto error = driver->start()) {
    return error;
  }
  return driver;
}

Driver::~Driver() {
  const auto contexts = contexts_.lock();
  for (size_t i = 0; i < contexts->size(); ++i) {
    if ((*contexts)[i] != nullptr) {
      // At the end of the process the driver may be shut down already. The call
      // then only returns an error.
      api_.releasePrimaryContext(devices_[i].id);
    }
  }
}

base::Error Driver::start() {
  int count = 0;
  base::Error error = check(api_.init(0), "cuInit");
  if (!error) {
    error = check(api_.driverVersion(&version_), "cuDriverGetVersion");
  }
  if (!error) {
    error = check(api_.deviceCount(&count), "cuDeviceGetCount");
  }
  for (int ordinal = 0; ordinal < count && !error; ++ordinal) {
    auto device = describe(ordinal);
    if (device.ok()) {
      devices_.push_back(device.value());
    } else {
      error = device.error();
    }
  }
  contexts_.lock()->resize(devices_.size());
  return error;
}

base::Result<Device> Driver::describe(int ordinal) const {
  Device device;
  Uuid physical;
  base::Error error = check(api_.device(&device.id, ordinal), "cuDeviceGet");
  if (!error) {
    error =
        check(api_.deviceUuid(&device.uuid, device.id), "cuDeviceGetUuid_v2");
  }
  if (!error) {
    error = check(api_.physicalUuid(&physical, device.id), "cuDeviceGetUuid");
  }
  const auto read = [&](int& value, int attribute) {
    if (!error) {
      error = check(
          api_.deviceAttribute(&value, attribute, device.id),
          "cuDeviceGetAttribute");
    }
  };
  read(device.major, kAttributeComputeCapabilityMajor);
  read(device.minor, kAttributeComputeCapabilityMinor);
  if (error) {
    return error;
  }
  device.isMig = device.uuid != physical;
  return device;
}

base::Error Driver::error(Status status, const std::string& what) const {
  const char* name = nullptr;
  const char* text = nullptr;
  api_.errorName(status, &name);
  api_.errorText(status, &text);
  std::string message = what + ": ";
  message += name != nullptr ? name : "CUDA error " + std::to_string(status);
  if (text != nullptr) {
    message += std::string(" (") + text + ")";
  }
  return {kindOf(status), std::move(message)};
}

base::Result<ContextHandle> Driver::context(int device) {
  if (device < 0 || static_cast<size_t>(device) >= devices_.size()) {
    return base::Error{
        base::ErrorKind::kInvalid,
        "there is no cuda:" + std::to_string(device) + " here, only " +
            std::to_string(devices_.size()) + " device(s)"};
  }
  auto contexts = contexts_.lock();
  ContextHandle& context = (*contexts)[static_cast<size_t>(device)];
  if (context == nullptr) {
    const Status status =
        api_.retainPrimaryContext(&context, devices_[device].id);
    if (status != status::kSuccess) {
      context = nullptr;
      return error(status, "the context of cuda:" + std::to_string(device));
    }
  }
  return context;
}

ContextGuard::ContextGuard(Driver& driver, int device) : driver_(driver) {
  auto context = driver.context(device);
  error_ = context.ok()
      ? driver.check(
            driver.api().pushContext(context.value()), "cuCtxPushCurrent")
      : context.error();
}

ContextGuard::~ContextGuard() {
  if (!error_) {
    ContextHandle popped = nullptr;
    driver_.api().popContext(&popped);
  }
}

base::Error copyAsync(
    Driver& driver,
    int device,
    Address destination,
    Address source,
    size_t size,
    StreamHandle stream) {
  const ContextGuard guard(driver, device);
  if (guard.error()) {
    return guard.error();
  }
  return driver.check(
      driver.api().copyAsync(destination, source, size, stream),
      "a copy of " + std::to_string(size) +
          " bytes on cuda:" + std::to_string(device));
}

} // namespace torch_rpc_ext::cuda
