#pragma once

#include "base/error.h"
#include "base/synchronized.h"
#include "cuda/driver.h"
#include "cuda/ipc_export.h"

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// The receiver's half of CUDA IPC: opens memory that other processes have
// exported.
namespace torch_rpc_ext::cuda {

// Names one peer process. Never used again for another process, not even for
// the one that takes the place of a worker that died.
using PeerKey = uint64_t;

// An allocation of another process that is mapped here while this object lives.
// Hold the object until the device has done all queued work that uses it.
class Mapping {
 public:
  // Unmaps the memory, which may wait for the device: keep it off hot paths.
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  Address address() const { // of the allocation's beginning
    return address_;
  }

 private:
  friend class MemoryImporter;
  Mapping(std::shared_ptr<Driver> driver, int device, Address address);

  const std::shared_ptr<Driver> driver_;
  const int device_;
  const Address address_;
};

struct ImporterStats {
  uint64_t hits = 0; // open() found the mapping
  uint64_t opened = 0; // open() mapped the memory
  uint64_t stale = 0; // dropped because newer memory overlaps their addresses
  uint64_t open = 0; // kept now
};

// Opens what a peer's MemoryExporter exported, each allocation once, and keeps
// it mapped: to map memory takes as long as to copy megabytes.
//
// A mapping is stale when the peer has freed the allocation: the mapping still
// shows the old memory. No peer says that it has freed an allocation. The
// importer drops a mapping when the peer exports an allocation that overlaps
// the mapping's addresses and has another buffer id.
//
// Owns: the mappings, together with their users.
// Thread: any.
class MemoryImporter {
 public:
  using Clock = std::chrono::steady_clock;

  // Keeps at most `maxOpen` mappings, but more while more are in use. Drops
  // those first that were not used for longest.
  explicit MemoryImporter(std::shared_ptr<Driver> driver, size_t maxOpen = 512);

  // `device` is this process's index of the device that the memory is on. The
  // run begins at mapping->address() + run.offset. If this fails with
  // kUnsupported, the bytes have to take another way.
  base::Result<std::shared_ptr<const Mapping>>
  open(PeerKey peer, int device, const MemoryExport& run);

  // The peer is gone.
  void forget(PeerKey peer);

  // Drops the mappings that have not been used for `age` or longer, and returns
  // their number. While a mapping exists, the device memory stays taken even
  // after the sender has freed it.
  size_t trim(Clock::duration age);

  ImporterStats stats() const;

 private:
  struct Entry {
    std::shared_ptr<const Mapping> mapping;
    uint64_t size = 0;
    uint64_t bufferId = 0;
    IpcMemoryHandle handle;
    Clock::time_point used;
  };
  using Key = std::pair<PeerKey, uint64_t>; // peer, base
  using Entries = std::map<Key, Entry>;
  using Dropped = std::vector<std::shared_ptr<const Mapping>>;
  struct State {
    Entries entries;
    ImporterStats stats;
  };

  static std::shared_ptr<const Mapping>
  find(State& state, PeerKey peer, const MemoryExport& run, Dropped& dropped);
  void makeRoom(Entries& entries, Dropped& dropped) const;
  base::Error check(const Mapping& mapping, const MemoryExport& run) const;

  const std::shared_ptr<Driver> driver_;
  const size_t maxOpen_;
  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::cuda
