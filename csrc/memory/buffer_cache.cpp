#include "memory/buffer_cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <limits>
#include <mutex>
#include <new>
#include <random>
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

// A map that begins on a huge page: map more, then cut off both ends.
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
  // Only a wish: kernels without huge pages refuse it.
  ::madvise(block, size, MADV_HUGEPAGE);
  return block;
}

// Memory is short when less than this share of it can be had.
constexpr uint64_t kShortShare = 16;

// Each holds a file descriptor.
constexpr size_t kMaxSharedBlocks = 128;

uint64_t randomId() {
  static std::mutex mutex;
  static std::mt19937_64 source{std::random_device{}()};
  std::lock_guard lock(mutex);
  uint64_t id = 0;
  while (id == 0) {
    id = source();
  }
  return id;
}

// Null, and no region, when there is no way.
void* mapShared(size_t size, SharedRegion& region) {
  const int fd =
      ::memfd_create(kSharedRegionName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    return nullptr;
  }
  void* map = MAP_FAILED;
  if (::ftruncate(fd, static_cast<off_t>(size)) == 0 &&
      ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) ==
          0) {
    map = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (map == MAP_FAILED) {
    ::close(fd);
    return nullptr;
  }
  region = {randomId(), fd};
  return map;
}

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
  // Free memory is mostly none, since the rest holds files: the kernel's own
  // guess of what could be had is in MemAvailable.
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

// Shared by the cache and every block in use, so that a block can come home
// after its cache is gone. Maps and unmaps without the lock: both may take
// milliseconds.
class BufferCache::State {
 public:
  struct Map {
    void* data;
    size_t capacity;
    SharedRegion region;
  };

  explicit State(size_t maxIdleBytes) : maxIdleBytes_(maxIdleBytes) {}

  // The new owner of `map`, whose data is null when there is no memory.
  Map take(size_t capacity, bool mustBeShared) {
    bool shared = mustBeShared;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      shared = shared || sharedClasses_.count(capacity) != 0;
      // The one used last is the one most likely still in the CPU's caches.
      const auto found =
          std::find_if(idle_.rbegin(), idle_.rend(), [&](const Idle& block) {
            return block.map.capacity == capacity &&
                (!shared || block.map.region.id != 0);
          });
      if (found != idle_.rend()) {
        const Map map = found->map;
        idle_.erase(std::next(found).base());
        stats_.idleBytes -= capacity;
        ++stats_.hits;
        countUsed(capacity);
        return map;
      }
      shared = shared && sharedBlocks_ < kMaxSharedBlocks;
      sharedBlocks_ += shared ? 1 : 0;
    }
    Map map{nullptr, capacity, {}};
    if (shared) {
      map.data = mapShared(capacity, map.region);
      if (map.data == nullptr) {
        std::lock_guard<std::mutex> lock(mutex_);
        --sharedBlocks_;
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
      std::lock_guard<std::mutex> lock(mutex_);
      ++stats_.misses;
      countUsed(capacity);
    }
    return map;
  }

  void giveBack(const Map& map, bool keep) noexcept {
    std::vector<Idle> surplus;
    bool kept = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stats_.usedBytes -= map.capacity;
      --stats_.usedBlocks;
      if (keep && !closed_ && map.capacity <= maxIdleBytes_) {
        try {
          idle_.push_back({map, Clock::now()});
          kept = true;
          stats_.idleBytes += map.capacity;
          trimLocked(surplus, Clock::time_point::min());
        } catch (const std::bad_alloc&) {
          // Out of memory for bookkeeping: what is still in idle_ stays valid.
        }
      }
    }
    if (!kept) {
      unmap(map);
    }
    unmap(surplus);
  }

  void share(size_t capacity) {
    std::vector<Idle> surplus;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!sharedClasses_.insert(capacity).second) {
        return;
      }
      // Private blocks of this size will not be asked for again.
      const auto others = std::stable_partition(
          idle_.begin(), idle_.end(), [capacity](const Idle& block) {
            return block.map.capacity != capacity;
          });
      surplus.assign(others, idle_.end());
      idle_.erase(others, idle_.end());
      stats_.idleBytes -= surplus.size() * capacity;
    }
    unmap(surplus);
  }

  size_t drop(Clock::time_point usedBefore) {
    std::vector<Idle> surplus;
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      trimLocked(surplus, usedBefore);
    } catch (const std::bad_alloc&) {
      return 0; // trimLocked() has changed nothing
    }
    return unmap(surplus);
  }

  void close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    drop(Clock::time_point::max());
  }

  BufferCacheStats stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    BufferCacheStats stats = stats_;
    stats.idleBlocks = idle_.size();
    return stats;
  }

 private:
  struct Idle {
    Map map;
    Clock::time_point since;
  };

  void countUsed(size_t capacity) {
    stats_.usedBytes += capacity;
    ++stats_.usedBlocks;
  }

  // Moves out the oldest blocks: those over the cap, those from before
  // `usedBefore`.
  void trimLocked(std::vector<Idle>& surplus, Clock::time_point usedBefore) {
    uint64_t left = stats_.idleBytes;
    auto end = idle_.begin();
    while (end != idle_.end() &&
           (left > maxIdleBytes_ || end->since <= usedBefore)) {
      left -= end->map.capacity;
      ++end;
    }
    surplus.assign(idle_.begin(), end);
    idle_.erase(idle_.begin(), end);
    stats_.idleBytes = left;
  }

  void unmap(const Map& map) noexcept {
    ::munmap(map.data, map.capacity);
    if (map.region.id != 0) {
      ::close(map.region.fd);
      std::lock_guard<std::mutex> lock(mutex_);
      --sharedBlocks_;
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

  const size_t maxIdleBytes_;
  mutable std::mutex mutex_;
  std::vector<Idle> idle_; // by age, the oldest first
  std::set<size_t> sharedClasses_;
  size_t sharedBlocks_ = 0; // that exist
  BufferCacheStats stats_;
  bool closed_ = false;
};

BufferCache::Block::Block(Block&& other) noexcept
    : state_(std::move(other.state_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)),
      region_(std::exchange(other.region_, {})),
      discarded_(std::exchange(other.discarded_, false)) {}

BufferCache::Block& BufferCache::Block::operator=(Block&& other) noexcept {
  std::swap(state_, other.state_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  std::swap(region_, other.region_);
  std::swap(discarded_, other.discarded_);
  return *this;
}

BufferCache::Block::~Block() {
  if (data_ != nullptr) {
    state_->giveBack({data_, capacity_, region_}, /*keep=*/!discarded_);
  }
}

BufferCache::BufferCache(size_t maxIdleBytes)
    : state_(std::make_shared<State>(maxIdleBytes)) {}

BufferCache::~BufferCache() {
  close();
}

Result<BufferCache::Block> BufferCache::acquire(size_t size) {
  const size_t capacity = sizeClass(size);
  // Lazy allocation would let a larger map succeed and kill the process later.
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

// One without data when there is no memory.
BufferCache::Block BufferCache::take(size_t size, bool mustBeShared) {
  const State::Map map = state_->take(sizeClass(size), mustBeShared);
  Block block;
  if (map.data != nullptr) {
    block.state_ = state_;
    block.data_ = map.data;
    block.size_ = size;
    block.capacity_ = map.capacity;
    block.region_ = map.region;
  }
  return block;
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
