#pragma once

#include "agent/device/ipc_wire.h"
#include "base/error.h"
#include "base/synchronized.h"
#include "cuda/driver.h"
#include "cuda/ipc_export.h"
#include "cuda/ipc_import.h"
#include "cuda/probe.h"

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

namespace torch_rpc_ext::agent::device {

// The CUDA driver, and the objects that do CUDA IPC with it.
// Thread: any.
struct IpcDriver {
  explicit IpcDriver(std::shared_ptr<cuda::Driver> loaded)
      : driver(std::move(loaded)),
        identity(cuda::identify(*driver)),
        exporter(driver),
        importer(driver) {}

  const std::shared_ptr<cuda::Driver> driver;
  const cuda::Identity identity;
  cuda::MemoryExporter exporter;
  cuda::MemoryImporter importer;
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

  struct Work {
    bool isLoaded = false;
    base::Error why; // why there is no driver
    std::map<int, OwnTrial> trials; // by device
  };
  base::Synchronized<Work> work_; // locked during slow calls of the driver
  base::Synchronized<std::shared_ptr<IpcDriver>> driver_;
};

} // namespace torch_rpc_ext::agent::device
