#pragma once

#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/ipc_export.h"

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

// The receiver's half of CUDA IPC: memory and events of other processes.
namespace torch_rpc_ext::cuda {

// Names one life of one process: never used again for another one.
using PeerKey = uint64_t;

// Another process's allocation, mapped here until this dies: hold it until the
// device has done what was queued on it.
class Mapping {
 public:
  // Closes the handle, which may wait for the device: not on a hot path.
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
  uint64_t hits = 0; // found open
  uint64_t opened = 0;
  uint64_t stale = 0; // closed because their memory was freed by the sender
  uint64_t open = 0; // now
};

// Opens what MemoryExporter exported, each allocation once, and keeps it open:
// to open takes as long as to copy megabytes. A handle is stale when its
// process has freed the allocation; the driver would go on to give out the old
// memory. That shows in a new allocation that overlaps the old one's
// addresses under another buffer id, or the sender says it (forget()).
// Owns: the mappings that are not in use; those in use belong to their users.
// Thread: any.
class MemoryImporter {
 public:
  using Clock = std::chrono::steady_clock;

  // Keeps at most `maxOpen` mappings; those unused for longest go first.
  explicit MemoryImporter(std::shared_ptr<Driver> driver, size_t maxOpen = 512);

  // `device`: the index here of the device that the memory is on. The run
  // begins at mapping->address() + run.offset. kUnsupported: take another way.
  base::Result<std::shared_ptr<const Mapping>>
  open(PeerKey peer, int device, const MemoryExport& run);

  // The peer has freed this allocation.
  void forget(PeerKey peer, uint64_t base, uint64_t bufferId);

  // The peer is gone.
  void forget(PeerKey peer);

  // Closes what has not been used for `age` or longer: the sender's device
  // memory is in use until then, even after it was freed there. Returns how
  // many.
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

  std::shared_ptr<const Mapping>
  find(PeerKey peer, const MemoryExport& run, Dropped& dropped);
  void makeRoom(Dropped& dropped);
  base::Error check(const Mapping& mapping, const MemoryExport& run) const;

  const std::shared_ptr<Driver> driver_;
  const size_t maxOpen_;
  mutable std::mutex mutex_;
  Entries entries_;
  ImporterStats stats_;
};

// Opens the events of EventPool, each once.
// Owns: the opened events.
// Thread: any.
class EventImporter {
 public:
  explicit EventImporter(std::shared_ptr<Driver> driver);
  ~EventImporter();

  // What is queued on the stream from now on waits for the event, which must
  // have been recorded. `device` is the index here of the event's device,
  // `streamDevice` that of the stream's.
  base::Error wait(
      PeerKey peer,
      int device,
      const IpcEventHandle& handle,
      int streamDevice,
      StreamHandle stream);

  // The peer is gone.
  void forget(PeerKey peer);

 private:
  struct Opened {
    int device = 0;
    EventHandle event = nullptr;
  };
  using Key = std::pair<PeerKey, std::string>; // peer, handle

  base::Result<EventHandle>
  open(PeerKey peer, int device, const IpcEventHandle& handle);
  void close(const Opened& opened);

  const std::shared_ptr<Driver> driver_;
  std::mutex mutex_;
  std::map<Key, Opened> events_;
};

} // namespace torch_rpc_ext::cuda
