#include "transport/ucx/shared_maps.h"

#include "memory/buffer_cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

namespace {

// The owner's cache has a cap of its own; this one is for regions that it has
// let go of meanwhile.
constexpr size_t kMaxIdleBytes = size_t{1} << 30;

using Clock = std::chrono::steady_clock;

struct Map {
  int32_t pid = 0;
  uint64_t region = 0;
  void* data = nullptr;
  size_t size = 0;
  Clock::time_point unusedSince;
};

// A descriptor of another process, or -1. Opened only when it is what it should
// be: a pipe would block, a device may do anything.
int openRegion(int32_t pid, uint64_t fd) {
  const std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const std::string wanted = std::string("/memfd:") + memory::kSharedRegionName;
  std::array<char, 64> target{};
  const ssize_t length = readlink(path.c_str(), target.data(), target.size());
  if (length < 0 || !std::string(target.data(), length).starts_with(wanted)) {
    return -1;
  }
  return open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
}

Map mapRegion(int32_t pid, const BulkEntry& entry) {
  const int fd = openRegion(pid, entry.fd);
  if (fd < 0) {
    return {};
  }
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  void* data = MAP_FAILED;
  // Unsealed, its owner could cut it off under our feet.
  if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, &info) == 0 &&
      static_cast<uint64_t>(info.st_size) >= entry.size) {
    data =
        mmap(nullptr, info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  close(fd);
  if (data == MAP_FAILED) {
    return {};
  }
  return {pid, entry.region, data, static_cast<size_t>(info.st_size), {}};
}

} // namespace

class SharedMaps::State : public std::enable_shared_from_this<State> {
 public:
  ~State() {
    unmap(idle_);
  }

  std::shared_ptr<void> map(int32_t pid, const BulkEntry& entry) {
    const auto fits = [&](const Map& map) {
      return map.pid == pid && map.region == entry.region &&
          map.size >= entry.size;
    };
    std::unique_lock lock(mutex_);
    for (const Used& used : used_) {
      if (auto users = fits(used.map) ? used.users.lock() : nullptr) {
        return users;
      }
    }
    if (const auto found = std::find_if(idle_.begin(), idle_.end(), fits);
        found != idle_.end()) {
      const Map map = *found;
      idleBytes_ -= map.size;
      idle_.erase(found);
      return use(map);
    }
    lock.unlock();
    const Map map = mapRegion(pid, entry);
    if (map.data == nullptr) {
      return nullptr;
    }
    lock.lock();
    return use(map);
  }

  // Returns how many are left.
  template <typename Predicate>
  size_t drop(Predicate&& unwanted) {
    std::vector<Map> surplus;
    size_t left = 0;
    {
      std::lock_guard lock(mutex_);
      const auto rest = std::stable_partition(
          idle_.begin(), idle_.end(), [&](const Map& map) {
            return !unwanted(map);
          });
      surplus.assign(rest, idle_.end());
      idle_.erase(rest, idle_.end());
      for (const Map& map : surplus) {
        idleBytes_ -= map.size;
      }
      left = idle_.size() + used_.size();
    }
    unmap(surplus);
    return left;
  }

 private:
  struct Used {
    Map map;
    std::weak_ptr<void> users;
  };

  // Under the lock.
  std::shared_ptr<void> use(const Map& map) {
    std::shared_ptr<void> users(
        map.data,
        [self = shared_from_this(), map](void*) { self->giveBack(map); });
    used_.push_back({map, users});
    return users;
  }

  void giveBack(Map map) {
    std::vector<Map> surplus;
    map.unusedSince = Clock::now();
    {
      std::lock_guard lock(mutex_);
      std::erase_if(used_, [&map](const Used& used) {
        return used.map.data == map.data;
      });
      idle_.push_back(map);
      idleBytes_ += map.size;
      auto end = idle_.begin();
      while (idleBytes_ > kMaxIdleBytes && end != idle_.end()) {
        idleBytes_ -= (end++)->size;
      }
      surplus.assign(idle_.begin(), end);
      idle_.erase(idle_.begin(), end);
    }
    unmap(surplus);
  }

  static void unmap(const std::vector<Map>& maps) {
    for (const Map& map : maps) {
      munmap(map.data, map.size);
    }
  }

  std::mutex mutex_;
  std::vector<Map> idle_; // by age, the oldest first
  size_t idleBytes_ = 0;
  std::vector<Used> used_;
};

SharedMaps::SharedMaps() : state_(std::make_shared<State>()) {}

SharedMaps::~SharedMaps() = default;

std::shared_ptr<void> SharedMaps::map(int32_t pid, const BulkEntry& entry) {
  return state_->map(pid, entry);
}

void SharedMaps::forget(int32_t pid) {
  state_->drop([pid](const Map& map) { return map.pid == pid; });
}

size_t SharedMaps::trim(Clock::duration age) {
  const auto before = Clock::now() - age;
  return state_->drop(
      [before](const Map& map) { return map.unusedSince <= before; });
}

} // namespace torch_rpc_ext::transport::ucx
