#include "transport/ucx/bulk/shared_maps.h"

#include "base/fork.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

using memory::SharedMap;

// Limits the unused maps. The owners' caches have limits of their own, but an
// owner may have dropped a region that is still mapped here.
constexpr size_t kMaxIdleBytes = size_t{1} << 30;
// Limited because each map has a descriptor. Bulk of further regions is copied.
constexpr size_t kMaxMaps = 256;

using Clock = std::chrono::steady_clock;

} // namespace

class SharedMaps::State : public std::enable_shared_from_this<State> {
 public:
  std::shared_ptr<SharedMap> map(int32_t pid, const BulkEntry& entry) {
    const auto fits = [&](int32_t owner, const SharedMap& map) {
      return owner == pid && map.region().id == entry.region &&
          map.size() >= entry.size && !map.discarded();
    };
    std::vector<Idle> surplus; // unmapped after the unlock
    std::unique_lock lock(mutex_);
    for (const Used& used : used_) {
      if (auto users =
              fits(used.pid, *used.map) ? used.users.lock() : nullptr) {
        return users;
      }
    }
    if (const auto found = std::find_if(
            idle_.begin(),
            idle_.end(),
            [&](const Idle& idle) { return fits(idle.pid, *idle.map); });
        found != idle_.end()) {
      const auto map = found->map;
      idleBytes_ -= map->size();
      idle_.erase(found);
      return use(lock, pid, map);
    }
    if (idle_.size() + used_.size() >= kMaxMaps) {
      if (idle_.empty()) {
        return nullptr;
      }
      dropOldest(lock, surplus, 1);
    }
    lock.unlock();
    const auto map = SharedMap::open(pid, entry.fd, entry.region, entry.size);
    if (map == nullptr) {
      return nullptr;
    }
    lock.lock();
    return use(lock, pid, map);
  }

  // Drops the unused maps for which `unwanted` is true. Returns how many maps
  // are left, used and unused.
  template <typename Predicate>
  size_t drop(Predicate&& unwanted) {
    std::vector<Idle> surplus; // unmapped after the unlock
    std::lock_guard lock(mutex_);
    const auto rest = std::stable_partition(
        idle_.begin(), idle_.end(), [&](const Idle& idle) {
          return !unwanted(idle);
        });
    surplus.assign(rest, idle_.end());
    idle_.erase(rest, idle_.end());
    for (const Idle& idle : surplus) {
      idleBytes_ -= idle.map->size();
    }
    return idle_.size() + used_.size();
  }

  struct Idle {
    int32_t pid;
    std::shared_ptr<SharedMap> map;
    Clock::time_point since;
  };

 private:
  using Locked = std::unique_lock<std::mutex>; // of mutex_
  struct Used {
    int32_t pid;
    const SharedMap* map; // lives until its last user has given it back
    std::weak_ptr<SharedMap> users;
  };

  std::shared_ptr<SharedMap>
  use(const Locked&, int32_t pid, const std::shared_ptr<SharedMap>& map) {
    std::shared_ptr<SharedMap> users(
        map.get(), [self = shared_from_this(), pid, map](SharedMap*) {
          self->giveBack(pid, map);
        });
    used_.push_back({pid, map.get(), users});
    return users;
  }

  void giveBack(int32_t pid, const std::shared_ptr<SharedMap>& map) {
    if (!home_.isHere()) {
      return; // a thread of the parent may have held mutex_ at the fork
    }
    std::vector<Idle> surplus; // unmapped after the unlock
    std::unique_lock lock(mutex_);
    std::erase_if(
        used_, [&map](const Used& used) { return used.map == map.get(); });
    if (map->discarded()) {
      return;
    }
    idle_.push_back({pid, map, Clock::now()});
    idleBytes_ += map->size();
    size_t count = 0;
    for (uint64_t left = idleBytes_; left > kMaxIdleBytes; ++count) {
      left -= idle_[count].map->size();
    }
    dropOldest(lock, surplus, count);
  }

  void dropOldest(const Locked&, std::vector<Idle>& surplus, size_t count) {
    const auto end = idle_.begin() + static_cast<ptrdiff_t>(count);
    surplus.assign(idle_.begin(), end);
    idle_.erase(idle_.begin(), end);
    for (const Idle& idle : surplus) {
      idleBytes_ -= idle.map->size();
    }
  }

  const base::HomeProcess home_;
  std::mutex mutex_;
  std::vector<Idle> idle_; // by age, the oldest first
  size_t idleBytes_ = 0;
  std::vector<Used> used_;
};

SharedMaps::SharedMaps() : state_(std::make_shared<State>()) {}

SharedMaps::~SharedMaps() = default;

std::shared_ptr<SharedMap> SharedMaps::map(
    int32_t pid,
    const BulkEntry& entry) {
  return state_->map(pid, entry);
}

void SharedMaps::forget(int32_t pid) {
  state_->drop([pid](const State::Idle& idle) { return idle.pid == pid; });
}

size_t SharedMaps::trim(Clock::duration age) {
  const auto before = Clock::now() - age;
  return state_->drop(
      [before](const State::Idle& idle) { return idle.since <= before; });
}

} // namespace torch_rpc_ext::transport::ucx::bulk
