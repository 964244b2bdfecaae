#pragma once

#include "base/error.h"
#include "compat/torch_compat.h"
#include "cuda/driver.h"
#include "cuda/ipc_export.h"
#include "cuda/ipc_import.h"
#include "cuda/probe.h"

#include <c10/core/Stream.h>

#include <memory>
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
