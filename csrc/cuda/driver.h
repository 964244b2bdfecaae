#pragma once

#include "base/error.h"
#include "base/synchronized.h"
#include "cuda/driver_api.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::cuda {

// One GPU of this process. Indices are those of CUDA_VISIBLE_DEVICES, the same
// as torch's.
struct Device {
  DeviceId id = 0;
  Uuid uuid; // a MIG slice has its own
  bool isMig = false;
  int major = 0; // compute capability
  int minor = 0;
};

// The CUDA driver, loaded by dlopen; csrc needs no other library of CUDA. Uses
// the devices' primary contexts, as torch does.
// Owns: a reference on each primary context that was used. The library stays
// loaded until the process ends.
// Thread: any.
// Outlives: its users, which hold it by shared_ptr.
class Driver {
 public:
  // libcuda.so.1, or the file that TORCH_RPC_EXT_LIBCUDA names. Creates no
  // context. Fails with kUnsupported where there is no driver, no GPU, or a
  // driver that is too old; the text says which.
  static base::Result<std::shared_ptr<Driver>> load();
  static base::Result<std::shared_ptr<Driver>> load(const std::string& library);

  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const DriverApi& api() const {
    return api_;
  }
  const std::vector<Device>& devices() const {
    return devices_;
  }
  int version() const { // 13000 is 13.0
    return version_;
  }

  // The error of a driver call that returned `status`, which is not kSuccess.
  // Its message is "what: CUDA_ERROR_... (text)".
  base::Error error(Status status, const std::string& what) const;

  // The error of `status`, or none if it is kSuccess.
  base::Error check(Status status, const std::string& what) const {
    return status == status::kSuccess ? base::Error{} : error(status, what);
  }

  // The primary context of a device. It is retained at its first use, until
  // this Driver is destroyed.
  base::Result<ContextHandle> context(int device);

 private:
  explicit Driver(const DriverApi& api) : api_(api) {}
  base::Error start();
  base::Result<Device> describe(int ordinal) const;

  const DriverApi api_;
  int version_ = 0;
  std::vector<Device> devices_;
  // By index; null until used.
  base::Synchronized<std::vector<ContextHandle>> contexts_;
};

// While this lives, a device's primary context is current for this thread; then
// the context from before is current again. Nearly every driver call needs a
// current context. Check error() before the first driver call.
// Thread: the one that made it.
class ContextGuard {
 public:
  ContextGuard(Driver& driver, int device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

  const base::Error& error() const {
    return error_;
  }

 private:
  Driver& driver_;
  base::Error error_;
};

// Queues a copy on a stream of `device`. Both addresses may be on any device,
// in a mapping of a peer's memory, or in pinned host memory.
base::Error copyAsync(
    Driver& driver,
    int device,
    Address destination,
    Address source,
    size_t size,
    StreamHandle stream);

} // namespace torch_rpc_ext::cuda
