#include "memory/buffer_cache.h"

#include "base/boundary.h"
#include "base/fork.h"
#include "base/synchronized.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <limits>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::memory {

using base::Error;
using base::ErrorKind;
using base::Result;

namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Maps memory that begins on a huge page: maps more than that, then unmaps both
// ends.
void* mapBlock(size_t size) {
  const size_t mapped = size + kHugePageBytes;
  void* const map = ::mmap(
      nullptr,
      mapped,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  if (map == MAP_FAILED) {
    return nullptr;
  }
  const auto begin = reinterpret_cast<uintptr_t>(map);
  const uintptr_t aligned =
      (begin + kHugePageBytes - 1) & ~uintptr_t{kHugePageBytes - 1};
  const size_t before = aligned - begin;
  const size_t after = mapped - before - size;
  if (before != 0) {
    ::munmap(map, before);
  }
  if (after != 0) {
    ::munmap(reinterpret_cast<void*>(aligned + size), after);
  }
  void* const block = reinterpret_cast<void*>(aligned);
  // May fail, on kernels without huge pages: the block is only slower then.
  ::madvise(block, size, MADV_HUGEPAGE);
  return block;
}

// See isShort().
constexpr uint64_t kShortShare = 16;

// Limited because each shared block holds a file descriptor.
constexpr size_t kMaxSharedBlocks = 128;

uint64_t freeMemory() {
  struct sysinfo info{};
  if (::sysinfo(&info) != 0) {
    return 0;
  }
  return (uint64_t{info.freeram} + info.bufferram + info.freeswap) *
      info.mem_unit;
}

} // namespace

bool isShort() {
  // MemFree is always small, because the kernel uses the rest to cache files.
  // MemAvailable is the kernel's estimate of what an application can still get.
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::string unit;
  for (uint64_t kib = 0; file >> name >> kib >> unit;) {
    if (name == "MemAvailable:") {
      return kib << 10 < physicalMemory() / kShortShare;
    }
  }
  return false;
}

uint64_t physicalMemory() {
  static const uint64_t bytes = [] {
    struct sysinfo info{};
    return ::sysinfo(&info) == 0
        ? (uint64_t{info.totalram} + info.totalswap) * info.mem_unit
        : std::numeric_limits<uint64_t>::max();
  }();
  return bytes;
}

size_t sizeClass(size_t size) {
  if (size > (std::numeric_limits<size_t>::max() >> 2)) {
    return 0;
  }
  const size_t wanted = std::max(size, kMinBlockBytes);
  const size_t step = std::bit_floor(wanted) / 8;
  return (wanted + step - 1) & ~(step - 1);
}

// Shared by the cache and every block in use, so that a block can be given back
// after its cache is destroyed. Maps and unmaps without the lock, because both
// may take milliseconds. In a forked child, giveBack() only unmaps.
class BufferCache::State {
 public:
  struct Map {
    void* data = nullptr;
    size_t capacity = 0;
    std::shared_ptr<SharedMap> shared = nullptr; // null: private
  };

  explicit State(size_t maxIdleBytes) : maxIdleBytes_(maxIdleBytes) {}

  // Gives the caller an idle or a new map. Its data is null if there is no
  // memory or no further shared map may be made.
  Map take(size_t capacity, bool mustBeShared) {
    bool shared = mustBeShared;
    const uint64_t lent = mustBeShared ? capacity : 0;
    {
      auto blocks = blocks_.lock();
      shared = shared || blocks->sharedClasses.count(capacity) != 0;
      auto found = findIdle(*blocks, capacity, shared);
      if (found == blocks->idle.end() && shared) {
        shared = mayShare(*blocks, lent);
        if (!shared && !mustBeShared) {
          found = findIdle(*blocks, capacity, shared);
        }
      }
      if (found != blocks->idle.end()) {
        const Map map = found->map;
        blocks->idle.erase(found);
        blocks->stats.idleBytes -= capacity;
        ++blocks->stats.hits;
        countUsed(*blocks, map, lent != 0);
        return map;
      }
      blocks->sharedBlocks += shared ? 1 : 0;
    }
    Map map{nullptr, capacity};
    if (shared) {
      map.shared = SharedMap::create(capacity);
      if (map.shared != nullptr) {
        map.data = map.shared->data();
      } else {
        --blocks_.lock()->sharedBlocks;
      }
    }
    if (map.data == nullptr && !mustBeShared) {
      map.data = mapBlock(capacity);
    }
    if (map.data == nullptr && !mustBeShared) {
      drop(Clock::time_point::max());
      map.data = mapBlock(capacity);
    }
    if (map.data != nullptr) {
      auto blocks = blocks_.lock();
      ++blocks->stats.misses;
      countUsed(*blocks, map, lent != 0);
    }
    return map;
  }

  void giveBack(const Map& map) noexcept {
    if (!home_.isHere()) {
      unmapPrivate(map); // a thread of the parent may have locked the mutex
      return;
    }
    std::vector<Idle> surplus;
    const bool keep = map.shared == nullptr || !map.shared->discarded();
    bool kept = false;
    bool returned = false;
    {
      auto blocks = blocks_.lock();
      blocks->stats.usedBytes -= map.capacity;
      --blocks->stats.usedBlocks;
      returned = endLoan(*blocks, map.shared.get());
      if (keep && !blocks->closed && map.capacity <= maxIdleBytes_) {
        try {
          blocks->idle.push_back({map, Clock::now()});
          kept = true;
          blocks->stats.idleBytes += map.capacity;
          trim(*blocks, surplus, Clock::time_point::min());
        } catch (const std::bad_alloc&) {
          // No memory for the bookkeeping. `idle` is unchanged or has one block
          // more; trimming waits for the next block that is given back.
        }
      }
    }
    if (!kept) {
      unmap(map);
    }
    unmap(surplus);
    if (returned || (kept && map.shared != nullptr)) {
      tellReturned(map.capacity, kept);
    }
  }

  void gotBack(SharedMap& memory) {
    const bool returned = endLoan(*blocks_.lock(), &memory);
    if (returned) {
      tellReturned(memory.size(), /*isIdle=*/false);
    }
  }

  void onReturn(Returned hook) {
    hook_ = std::move(hook);
  }

  void share(size_t capacity) {
    std::vector<Idle> surplus;
    {
      auto blocks = blocks_.lock();
      if (!blocks->sharedClasses.insert(capacity).second) {
        return;
      }
      // Unmap the idle private blocks of this class, because take() now prefers
      // shared blocks, even new ones.
      std::vector<Idle>& idle = blocks->idle;
      const auto others = std::stable_partition(
          idle.begin(), idle.end(), [capacity](const Idle& block) {
            return block.map.capacity != capacity ||
                block.map.shared != nullptr;
          });
      surplus.assign(others, idle.end());
      idle.erase(others, idle.end());
      blocks->stats.idleBytes -= surplus.size() * capacity;
    }
    unmap(surplus);
  }

  size_t drop(Clock::time_point usedBefore) {
    std::vector<Idle> surplus;
    try {
      trim(*blocks_.lock(), surplus, usedBefore);
    } catch (const std::bad_alloc&) {
      return 0; // trim() has changed nothing
    }
    return unmap(surplus);
  }

  void close() {
    blocks_.lock()->closed = true;
    drop(Clock::time_point::max());
  }

  BufferCacheStats stats() const {
    const auto blocks = blocks_.lock();
    BufferCacheStats stats = blocks->stats;
    stats.idleBlocks = blocks->idle.size();
    return stats;
  }

 private:
  struct Idle {
    Map map;
    Clock::time_point since;
  };
  struct Blocks {
    std::vector<Idle> idle; // sorted: those idle for longest come first
    std::set<size_t> sharedClasses; // see share()
    size_t sharedBlocks = 0; // idle and in use
    uint64_t lentBytes = 0;
    size_t lentBlocks = 0;
    BufferCacheStats stats;
    bool closed = false;
  };

  // Of the idle blocks that fit, the one used last: parts of it may still be in
  // the CPU's caches.
  static std::vector<Idle>::iterator
  findIdle(Blocks& blocks, size_t capacity, bool shared) {
    std::vector<Idle>& idle = blocks.idle;
    const auto found =
        std::find_if(idle.rbegin(), idle.rend(), [&](const Idle& block) {
          return block.map.capacity == capacity &&
              (!shared || block.map.shared != nullptr);
        });
    return found == idle.rend() ? idle.end() : std::next(found).base();
  }

  // Whether one more shared block may be made. `lent`: its bytes, if it is for
  // acquireShared(), else 0.
  bool mayShare(const Blocks& blocks, uint64_t lent) const {
    if (blocks.sharedBlocks >= kMaxSharedBlocks) {
      return false;
    }
    const bool few =
        blocks.lentBlocks < 2 || blocks.lentBytes + lent <= kMaxLentBytes;
    const uint64_t mapped = blocks.stats.usedBytes + blocks.stats.idleBytes;
    return lent == 0 || blocks.sharedBlocks < 2 ||
        (few && mapped + lent <= maxIdleBytes_);
  }

  static void countUsed(Blocks& blocks, const Map& map, bool lent) {
    blocks.stats.usedBytes += map.capacity;
    ++blocks.stats.usedBlocks;
    if (lent && !map.shared->setLent(true)) {
      blocks.lentBytes += map.capacity;
      ++blocks.lentBlocks;
    }
  }

  // Whether the memory was lent.
  static bool endLoan(Blocks& blocks, SharedMap* memory) {
    if (memory == nullptr || !memory->setLent(false)) {
      return false;
    }
    blocks.lentBytes -= memory->size();
    --blocks.lentBlocks;
    return true;
  }

  void tellReturned(size_t capacity, bool isIdle) const {
    if (hook_) {
      base::guarded(base::Boundary::kStorage, [&] { hook_(capacity, isIdle); });
    }
  }

  // Moves the blocks that have been idle for longest to `surplus`: as many as
  // are over maxIdleBytes_, and all that were last used before `usedBefore`.
  void trim(
      Blocks& blocks,
      std::vector<Idle>& surplus,
      Clock::time_point usedBefore) const {
    uint64_t left = blocks.stats.idleBytes;
    auto end = blocks.idle.begin();
    while (end != blocks.idle.end() &&
           (left > maxIdleBytes_ || end->since <= usedBefore)) {
      left -= end->map.capacity;
      ++end;
    }
    surplus.assign(blocks.idle.begin(), end);
    blocks.idle.erase(blocks.idle.begin(), end);
    blocks.stats.idleBytes = left;
  }

  static void unmapPrivate(const Map& map) noexcept {
    if (map.shared == nullptr) {
      ::munmap(map.data, map.capacity);
    }
  }

  // Unmaps private memory at once. Shared memory is unmapped when the last copy
  // of map.shared dies.
  void unmap(const Map& map) noexcept {
    unmapPrivate(map);
    if (map.shared != nullptr) {
      --blocks_.lock()->sharedBlocks;
    }
  }

  size_t unmap(const std::vector<Idle>& blocks) noexcept {
    size_t bytes = 0;
    for (const Idle& block : blocks) {
      unmap(block.map);
      bytes += block.map.capacity;
    }
    return bytes;
  }

  const base::HomeProcess home_;
  const size_t maxIdleBytes_;
  Returned hook_; // set before the first block is lent
  base::Synchronized<Blocks> blocks_;
};

BufferCache::Block::Block(Block&& other) noexcept
    : state_(std::move(other.state_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)),
      shared_(std::move(other.shared_)) {}

BufferCache::Block& BufferCache::Block::operator=(Block&& other) noexcept {
  std::swap(state_, other.state_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  std::swap(shared_, other.shared_);
  return *this;
}

BufferCache::Block::~Block() {
  if (data_ != nullptr) {
    state_->giveBack({data_, capacity_, std::move(shared_)});
  }
}

BufferCache::BufferCache(size_t maxIdleBytes)
    : state_(std::make_shared<State>(maxIdleBytes)) {}

BufferCache::~BufferCache() {
  close();
}

Result<BufferCache::Block> BufferCache::acquire(size_t size) {
  const size_t capacity = sizeClass(size);
  // The kernel allocates pages lazily: a larger mapping could succeed, and the
  // process be killed when it is filled.
  if (capacity == 0 || size > physicalMemory()) {
    return Error(
        ErrorKind::kOverloaded,
        "a receive buffer of " + std::to_string(size) +
            " bytes is more than the " + std::to_string(physicalMemory()) +
            " bytes of memory of this machine");
  }
  Block block = take(size, /*mustBeShared=*/false);
  if (block.data() == nullptr) {
    return Error(
        ErrorKind::kOverloaded,
        "no memory for a receive buffer of " + std::to_string(size) +
            " bytes: " + std::to_string(freeMemory()) + " bytes are free");
  }
  return block;
}

std::optional<BufferCache::Block> BufferCache::acquireShared(size_t size) {
  if (sizeClass(size) == 0 || size > physicalMemory()) {
    return std::nullopt;
  }
  Block block = take(size, /*mustBeShared=*/true);
  return block.data() == nullptr ? std::nullopt
                                 : std::optional<Block>(std::move(block));
}

// The block's data() is null if State::take() had no map.
BufferCache::Block BufferCache::take(size_t size, bool mustBeShared) {
  const State::Map map = state_->take(sizeClass(size), mustBeShared);
  Block block;
  if (map.data != nullptr) {
    block.state_ = state_;
    block.data_ = map.data;
    block.size_ = size;
    block.capacity_ = map.capacity;
    block.shared_ = map.shared;
  }
  return block;
}

void BufferCache::gotBack(SharedMap& memory) {
  state_->gotBack(memory);
}

void BufferCache::onReturn(Returned hook) {
  state_->onReturn(std::move(hook));
}

void BufferCache::share(size_t size) {
  if (const size_t capacity = sizeClass(size)) {
    state_->share(capacity);
  }
}

size_t BufferCache::trim(Clock::duration age) {
  return state_->drop(Clock::now() - age);
}

void BufferCache::close() {
  state_->close();
}

BufferCacheStats BufferCache::stats() const {
  return state_->stats();
}

} // namespace torch_rpc_ext::memory
