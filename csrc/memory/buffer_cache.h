#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "memory/shared_map.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace torch_rpc_ext::memory {

// Blocks of this size and more are worth a map of their own.
inline constexpr size_t kMinBlockBytes = size_t{1} << 20;

// The size class that a request is served from: eight per power of two, so at
// most one eighth more than asked for. 0 if there is none.
size_t sizeClass(size_t size);

// Two blocks may always be lent: what was sent last, and what is sent now.
inline constexpr uint64_t kMaxLentBytes = uint64_t{256} << 20;

struct BufferCacheStats {
  uint64_t hits = 0; // acquire() served from idle blocks
  uint64_t misses = 0; // acquire() that needed a new map
  uint64_t idleBytes = 0; // mapped, waiting for their next use
  uint64_t idleBlocks = 0;
  uint64_t usedBytes = 0; // mapped, in the hands of callers
  uint64_t usedBlocks = 0;
};

// Receive buffers, kept for their next use: fresh pages cost ten times what a
// copy into warm ones does. Blocks are maps, aligned to huge pages.
// Owns: the idle blocks; those in use belong to their callers.
// Thread: any.
// Outlives: nothing; a Block that outlives its cache unmaps itself.
class BufferCache {
  class State;

 public:
  // Gives its memory back when it is destroyed, on any thread.
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept;
    Block& operator=(Block&& other) noexcept;
    ~Block();

    void* data() const {
      return data_;
    }
    size_t size() const { // what was asked for
      return size_;
    }
    size_t capacity() const { // what is mapped
      return capacity_;
    }
    // Null for private memory.
    SharedMap* shared() const {
      return shared_.get();
    }
    // Of shared memory that another process may have; else none.
    SharedRegion region() const {
      return shared_ == nullptr || shared_->discarded() ? SharedRegion{}
                                                        : shared_->region();
    }
    // Another process may still use it: never to be handed out again.
    void discard() {
      if (shared_ != nullptr) {
        shared_->discard();
      }
    }

   private:
    friend class BufferCache;
    std::shared_ptr<State> state_;
    void* data_ = nullptr;
    size_t size_ = 0;
    size_t capacity_ = 0;
    std::shared_ptr<SharedMap> shared_;
    bool lent_ = false; // by acquireShared()
  };

  using Clock = std::chrono::steady_clock;

  // Keeps at most `maxIdleBytes` of idle blocks; those unused for longest go
  // first. 0 keeps none.
  explicit BufferCache(size_t maxIdleBytes);
  ~BufferCache();
  BufferCache(const BufferCache&) = delete;
  BufferCache& operator=(const BufferCache&) = delete;

  // The content is whatever its last user left there. Fails with kOverloaded.
  base::Result<Block> acquire(size_t size);

  // A block that another process can map; none when there is no memory, when
  // there are too many of them, or when none is idle and kMaxLentBytes of such
  // blocks are in use: to fill fresh pages takes longer than to have the
  // receiver copy.
  std::optional<Block> acquireShared(size_t size);

  // From now on blocks for this size can be mapped by other processes: for
  // workers that return what they were sent. Not from the start, because such
  // memory cannot have huge pages.
  void share(size_t size);

  // Unmaps the blocks that have been idle for `age` or longer. Returns bytes.
  size_t trim(Clock::duration age);

  // Unmaps all idle blocks, and from now on each block at its release.
  void close();

  BufferCacheStats stats() const;

 private:
  Block take(size_t size, bool mustBeShared);

  std::shared_ptr<State> state_;
};

// Whether this machine is about to run out of memory.
bool isShort();

// Bytes of memory that this machine has: nothing larger can be received.
uint64_t physicalMemory();

} // namespace torch_rpc_ext::memory
