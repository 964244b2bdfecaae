#pragma once

#include "base/bytes.h"
#include "base/error.h"
#include "base/synchronized.h"
#include "cuda/driver.h"

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

// The sender's half of CUDA IPC: exports memory, so that another process of
// this host can read from it.
namespace torch_rpc_ext::cuda {

// Tells another process where a run of bytes lies.
struct MemoryExport {
  IpcMemoryHandle handle; // of the whole allocation
  uint64_t base = 0; // address of the allocation in the sender
  uint64_t size = 0; // of the allocation
  uint64_t bufferId = 0; // the sender never uses it for another allocation
  uint64_t offset = 0; // of the run, from `base`
  uint64_t bytes = 0; // of the run

  static constexpr size_t kWireBytes = 64 + 5 * 8;
  void write(base::ByteWriter& writer) const;
  // Fails with kInvalid if bytes are missing, or if the run is not within the
  // allocation.
  static base::Result<MemoryExport> read(base::ByteReader& reader);
};

// Exports allocations, and remembers their handles: one tensor is often sent
// many times, and torch's allocator puts many tensors into one allocation.
// Thread: any.
class MemoryExporter {
 public:
  explicit MemoryExporter(std::shared_ptr<Driver> driver);

  // Fails with kUnsupported and the reason for memory that cannot be exported
  // (expandable segments, cudaMallocAsync, managed memory). The caller must
  // keep the bytes allocated until the receiver has said that it is done.
  base::Result<MemoryExport>
  exportMemory(int device, Address address, uint64_t bytes);

 private:
  struct Known {
    uint64_t bufferId = 0;
    base::Result<IpcMemoryHandle> handle; // or why there is none
  };
  base::Result<IpcMemoryHandle> handleOf(Address base, uint64_t bufferId);

  const std::shared_ptr<Driver> driver_;
  base::Synchronized<std::unordered_map<Address, Known>> known_; // by base
};

} // namespace torch_rpc_ext::cuda
