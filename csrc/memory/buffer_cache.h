#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "memory/shared_map.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace torch_rpc_ext::memory {

// The smallest block: less memory is not worth a mapping of its own.
inline constexpr size_t kMinBlockBytes = size_t{1} << 20;

// The capacity of the block that serves a request for `size` bytes. There are
// eight classes per power of two, so above kMinBlockBytes a block is at most
// one eighth larger than the request. 0 if `size` is too large.
size_t sizeClass(size_t size);

// acquireShared() maps a further block only if then at most two blocks, or at
// most this many bytes, are lent, and if no more bytes are mapped than the
// cache may keep. Two blocks may exist whatever their size: for the message
// sent last, and the message being sent. A block counts as lent from
// acquireShared() until it comes back to the cache, or gotBack() is called for
// it.
inline constexpr uint64_t kMaxLentBytes = uint64_t{256} << 20;

struct BufferCacheStats {
  uint64_t hits = 0; // acquire() served from idle blocks
  uint64_t misses = 0; // acquire() that needed a new mapping
  uint64_t idleBytes = 0; // mapped, waiting for their next use
  uint64_t idleBlocks = 0;
  uint64_t usedBytes = 0; // mapped, in the hands of callers
  uint64_t usedBlocks = 0;
};

// Receive buffers, kept for their next use: to fill fresh pages takes ten times
// as long as to fill pages that were used before. A block is a mapping, either
// private and aligned to huge pages, or a SharedMap.
// Owns: the idle blocks. A caller owns the block that it has acquired.
// Thread: any.
// Outlives: nothing; a Block that outlives its cache unmaps its memory.
class BufferCache {
  class State;

 public:
  // Gives its memory back to the cache when it is destroyed, on any thread.
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept;
    Block& operator=(Block&& other) noexcept;
    ~Block();

    void* data() const {
      return data_;
    }
    size_t size() const { // bytes that the caller asked for
      return size_;
    }
    size_t capacity() const { // bytes that are mapped
      return capacity_;
    }
    // Null for private memory.
    SharedMap* shared() const {
      return shared_.get();
    }
    // The memory for another process to map. Without an id for private memory,
    // or after discard().
    SharedRegion region() const {
      return shared_ == nullptr || shared_->discarded() ? SharedRegion{}
                                                        : shared_->region();
    }
    // The cache must not give this memory out again, because another process
    // may still use it. No effect on private memory.
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
  };

  using Clock = std::chrono::steady_clock;

  // Keeps at most `maxIdleBytes` of idle blocks, and unmaps those first that
  // have been idle for longest. 0 keeps none.
  explicit BufferCache(size_t maxIdleBytes);
  ~BufferCache();
  BufferCache(const BufferCache&) = delete;
  BufferCache& operator=(const BufferCache&) = delete;

  // The block contains what its last user left there. Fails with kOverloaded if
  // there is no memory.
  base::Result<Block> acquire(size_t size);

  // A block that another process can map. std::nullopt if no such block is idle
  // and no further one may be made: there is no memory, too many shared blocks
  // exist, or kMaxLentBytes are lent. The limit on lent bytes is there because
  // filling fresh pages takes longer than letting the receiver copy.
  std::optional<Block> acquireShared(size_t size);

  // The receiver of a lent block has returned it, and this process uses it: the
  // block is not lent any more.
  void gotBack(SharedMap& memory);

  // Calls `hook` when a block of so much capacity stops being lent, or a block
  // that can be lent becomes idle: on the thread on which this happens, which
  // may be in the middle of anything. `isIdle`: the block can be lent again; if
  // not, this process uses it after gotBack(), or the cache has not kept it. To
  // be called once, before the first acquireShared().
  using Returned = std::function<void(size_t capacity, bool isIdle)>;
  void onReturn(Returned hook);

  // From now on acquire() gives blocks of this size class that other processes
  // can map, while not too many exist. For workers that send back what they
  // have received. Not the default, because shared memory cannot have huge
  // pages.
  void share(size_t size);

  // Unmaps the blocks that have been idle for `age` or longer. Returns their
  // bytes.
  size_t trim(Clock::duration age);

  // Unmaps all idle blocks, and from now on each block at its release.
  void close();

  BufferCacheStats stats() const;

 private:
  Block take(size_t size, bool mustBeShared);

  std::shared_ptr<State> state_;
};

// Whether this machine is about to run out of memory: less than 1/16 of
// physicalMemory() is available.
bool isShort();

// Bytes of RAM and swap of this machine: nothing larger can be received.
uint64_t physicalMemory();

} // namespace torch_rpc_ext::memory
