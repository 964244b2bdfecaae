#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace torch_rpc_ext::memory {

// Names memory that another process can map: a sealed memfd, which cannot
// shrink. `id` is random and unique among the regions that exist; 0 means no
// region.
struct SharedRegion {
  uint64_t id = 0;
  int fd = -1;
};

// The mapping of a sealed memfd of this process or of another one.
//
// A forked child does not share it. If no tensor of this process lies in the
// map (Hold), the child has neither the map nor the descriptor. If a tensor
// does, the map becomes private (copy on write) right before the fork, so
// parent and child each keep the values and see only their own writes, as with
// any memory. Pages that neither writes to still are those of the memfd, so the
// map is discarded: no process may write to the memfd any more. Only where the
// map cannot be made private, the child shares it, and the log says so.
//
// Owns: the mapping, and a descriptor.
// Thread: any.
class SharedMap {
 public:
  // A new region; null if the system does not give one.
  static std::shared_ptr<SharedMap> create(size_t size);
  // Maps the region `id` of process `pid`, which has it at descriptor `fd`.
  // Null if it cannot be opened, is not a sealed memfd with our name, or has
  // fewer than `size` bytes. `isPrivate`: what is written to the map is seen
  // here only, because other processes map the region, too.
  static std::shared_ptr<SharedMap> open(
      int32_t pid,
      uint64_t fd,
      uint64_t id,
      size_t size,
      bool isPrivate = false);

  ~SharedMap();
  SharedMap(const SharedMap&) = delete;
  SharedMap& operator=(const SharedMap&) = delete;

  // Null in a forked child that has no mapping of it.
  void* data() const {
    return data_;
  }
  size_t size() const {
    return size_;
  }
  const SharedRegion& region() const {
    return region_;
  }
  // Whether open() has made this map: another process owns the region.
  bool isForeign() const {
    return foreign_;
  }

  // The memory must not be given to a next user, because a forked child or
  // another process may still read its content.
  void discard() {
    discarded_.store(true);
  }
  bool discarded() const {
    return discarded_.load();
  }
  // Whether what is written to the map is seen by this process only: opened so,
  // or made so by a fork.
  bool isPrivate() const {
    return private_.load();
  }

  // For the BufferCache: whether a receiver has the memory. Returns what was
  // set before.
  bool setLent(bool lent) {
    return lent_.exchange(lent);
  }

  // While a Hold lives, a tensor of this process lies in the map. `map` may be
  // null, then the Hold does nothing.
  class Hold {
   public:
    explicit Hold(SharedMap* map);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    SharedMap* const map_;
  };

 private:
  class AllMaps;
  static AllMaps& all();

  SharedMap(
      void* data,
      size_t size,
      SharedRegion region,
      bool foreign,
      bool isPrivate) noexcept
      : data_(data),
        size_(size),
        foreign_(foreign),
        region_(region),
        private_(isPrivate) {}

  void makePrivate();
  void leaveBehind();

  void* data_;
  const size_t size_;
  const bool foreign_;
  SharedRegion region_;
  std::atomic<bool> discarded_{false};
  std::atomic<bool> lent_{false};
  std::atomic<bool> private_;
  // The mutex of AllMaps guards the rest.
  uint32_t holds_ = 0;
  SharedMap* next_ = nullptr;
  SharedMap* previous_ = nullptr;
};

} // namespace torch_rpc_ext::memory
