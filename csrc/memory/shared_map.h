#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace torch_rpc_ext::memory {

// Memory that another process can map: a sealed memfd of this process, which
// cannot shrink. `id` is 0 for private memory, else random: it names the region
// for as long as that exists.
struct SharedRegion {
  uint64_t id = 0;
  int fd = -1;
};

// A sealed memfd, of this process or of another one, that is mapped here.
//
// A child never shares it. What no tensor of this process lies in, the child
// has neither a map nor a descriptor of. Maps that are held, because tensors
// lie in them, become private ones (copy on write) right before the fork: each
// process has its values and its own writes from then on, as with any memory.
// Untouched pages are those of the memfd still, so it is discarded: nobody may
// write to it any more.
//
// Owns: the map, and a descriptor.
// Thread: any.
class SharedMap {
 public:
  // A new region; null when there is no way.
  static std::shared_ptr<SharedMap> create(size_t size);
  // Region `id` of process `pid`, which knows it by the descriptor `fd`; null
  // if it cannot be had, has fewer bytes, or is not what a peer of ours offers.
  static std::shared_ptr<SharedMap>
  open(int32_t pid, uint64_t fd, uint64_t id, size_t size);

  ~SharedMap();
  SharedMap(const SharedMap&) = delete;
  SharedMap& operator=(const SharedMap&) = delete;

  // Null in a child that has no map of it.
  void* data() const {
    return data_;
  }
  size_t size() const {
    return size_;
  }
  const SharedRegion& region() const {
    return region_;
  }

  // Never to be written to by its next user, here or elsewhere: a child, or
  // another process, may still use what is in it.
  void discard() {
    discarded_.store(true);
  }
  bool discarded() const {
    return discarded_.load();
  }

  // While it lives, a tensor of this process lies in the map (null: in none).
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

  SharedMap(void* data, size_t size, SharedRegion region) noexcept
      : data_(data), size_(size), region_(region) {}

  void makePrivate();
  void leaveBehind();

  void* data_;
  const size_t size_;
  SharedRegion region_;
  std::atomic<bool> discarded_{false};
  // The rest under the lock of all.
  uint32_t holds_ = 0;
  bool private_ = false;
  SharedMap* next_ = nullptr;
  SharedMap* previous_ = nullptr;
};

} // namespace torch_rpc_ext::memory
