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

// The CUDA driver and what is used of it for CUDA IPC.
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

// Loads the driver at its first use, and makes what peers try to read.
// Owns: both.
// Thread: any.
class IpcLoader {
 public:
  // The same answer each time.
  base::Result<std::shared_ptr<IpcDriver>> load();
  // Null before load().
  std::shared_ptr<IpcDriver> loaded() const;
  // One for each device, for all peers: it stays in their caches.
  base::Result<IpcOffer::Trial> trial(IpcDriver& driver, int device);

 private:
  struct OwnTrial {
    std::unique_ptr<cuda::Trial> trial;
    uint64_t nonce = 0;
  };

  std::mutex workMutex_; // held for as long as the driver takes
  bool isLoaded_ = false;
  base::Error why_; // why there is none
  std::map<int, OwnTrial> trials_; // by device
  mutable std::mutex mutex_;
  std::shared_ptr<IpcDriver> driver_;
};

// What the driver knows a stream of torch's as.
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
