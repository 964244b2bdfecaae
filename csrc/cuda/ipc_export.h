#pragma once

#include "base/bytes.h"
#include "base/error.h"
#include "cuda/driver.h"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

// The sender's half of CUDA IPC: memory and events that another process of this
// host can use. On the wire each is a fixed number of bytes.
namespace torch_rpc_ext::cuda {

// Where a run of bytes lies, for another process.
struct MemoryExport {
  IpcMemoryHandle handle; // of the whole allocation
  uint64_t base = 0; // of the allocation, in the sender
  uint64_t size = 0; // of the allocation
  uint64_t bufferId = 0; // no other allocation of that process ever has it
  uint64_t offset = 0; // of the run, from `base`
  uint64_t bytes = 0; // of the run

  static constexpr size_t kWireBytes = 64 + 5 * 8;
  void write(base::ByteWriter& writer) const;
  // kInvalid if it is cut off or says that the run is not in the allocation.
  static base::Result<MemoryExport> read(base::ByteReader& reader);
};

// Exports allocations, and remembers the handles: a tensor is sent again and
// again, and torch's allocator cuts many tensors from one allocation.
// Thread: any.
class MemoryExporter {
 public:
  explicit MemoryExporter(std::shared_ptr<Driver> driver);

  // kUnsupported, with the reason, for memory that cannot be exported
  // (expandable segments, cudaMallocAsync, managed memory): take another way.
  // The bytes must stay allocated until the receiver has said that it is done.
  base::Result<MemoryExport>
  exportMemory(int device, Address address, uint64_t bytes);

 private:
  struct Known {
    uint64_t bufferId = 0;
    base::Error why; // why it cannot be exported, or none
    IpcMemoryHandle handle;
  };
  base::Result<IpcMemoryHandle> handleOf(Address base, uint64_t bufferId);

  const std::shared_ptr<Driver> driver_;
  std::mutex mutex_;
  std::unordered_map<Address, Known> known_; // by base
};

// Events that another process can make its stream wait for; kept for their next
// use, because making and opening one takes long.
// Thread: any.
class EventPool {
  struct Event {
    int device = 0;
    EventHandle event = nullptr;
    IpcEventHandle handle;
  };
  class State;

 public:
  // A recorded event. Keep it until the receiver has said that it is done: then
  // its event goes back to the pool.
  class Recorded {
   public:
    Recorded(Recorded&& other) noexcept = default;
    Recorded& operator=(Recorded&& other) noexcept;
    ~Recorded();

    const IpcEventHandle& handle() const {
      return event_.handle;
    }
    EventHandle event() const {
      return event_.event;
    }

   private:
    friend class EventPool;
    Recorded(std::shared_ptr<State> state, const Event& event)
        : state_(std::move(state)), event_(event) {}

    std::shared_ptr<State> state_;
    Event event_;
  };

  explicit EventPool(std::shared_ptr<Driver> driver);

  // Marks what is queued on the stream up to here.
  base::Result<Recorded> record(int device, StreamHandle stream);

 private:
  std::shared_ptr<State> state_;
};

} // namespace torch_rpc_ext::cuda
