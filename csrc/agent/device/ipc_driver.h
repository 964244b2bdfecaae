#pragma once

#include "agent/device/ipc_wire.h"
#include "base/error.h"
#include "compat/stream_handle.h"
#include "cuda/driver.h"
#include "cuda/ipc_export.h"
#include "cuda/ipc_import.h"
#include "cuda/probe.h"

#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace torch_rpc_ext::agent::device {

// The CUDA driver, and the objects that do CUDA IPC with it.
// Thread: any.
struct IpcDriver {
  explicit IpcDriver(std::shared_ptr<cuda::Driver> loaded)
      : driver(std::move(loaded)),
        identity(cuda::identify(*driver)),
        exporter(driver),
        events(driver),
        importer(driver),
        peerEvents(driver) {}

  const std::shared_ptr<cuda::Driver> driver;
  const cuda::Identity identity;
  cuda::MemoryExporter exporter;
  cuda::EventPool events;
  cuda::MemoryImporter importer;
  cuda::EventImporter peerEvents;
};

// Loads the driver at its first use, and makes the trials for peers.
// Owns: both.
// Thread: any.
class IpcLoader {
 public:
  // Tries only once: a later call returns the same result.
  base::Result<std::shared_ptr<IpcDriver>> load();
  // Null before load().
  std::shared_ptr<IpcDriver> loaded() const;
  // The trial of a device. All peers get the same one, and may keep it mapped.
  base::Result<IpcOffer::Trial> trial(IpcDriver& driver, int device);

 private:
  struct OwnTrial {
    std::unique_ptr<cuda::Trial> trial;
    uint64_t nonce = 0;
  };

  std::mutex workMutex_; // held during slow calls of the driver
  bool isLoaded_ = false;
  base::Error why_; // why there is no driver
  std::map<int, OwnTrial> trials_; // by device
  mutable std::mutex mutex_;
  std::shared_ptr<IpcDriver> driver_;
};

// The driver's handle of a torch stream.
inline base::Result<cuda::StreamHandle> handleOf(const c10::Stream& stream) {
  const auto handle = compat::nativeHandle(stream);
  if (!handle) {
    return base::Error(
        base::ErrorKind::kUnsupported,
        "this version of torch does not tell the handles of its streams");
  }
  return static_cast<cuda::StreamHandle>(*handle);
}

} // namespace torch_rpc_ext::agent::device
