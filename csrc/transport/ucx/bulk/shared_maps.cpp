#include "transport/ucx/bulk/shared_maps.h"

#include "base/fork.h"
#include "base/synchronized.h"

#include <algorithm>
#include <new>
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
    auto maps = maps_.lock();
    for (const Used& used : maps->used) {
      if (auto users =
              fits(used.pid, *used.map) ? used.users.lock() : nullptr) {
        return users;
      }
    }
    if (const auto found = std::find_if(
            maps->idle.begin(),
            maps->idle.end(),
            [&](const Idle& idle) { return fits(idle.pid, *idle.map); });
        found != maps->idle.end()) {
      const auto map = found->map;
      maps->idleBytes -= map->size();
      maps->idle.erase(found);
      return use(*maps, pid, map);
    }
    if (maps->idle.size() + maps->used.size() >= kMaxMaps) {
      if (maps->idle.empty()) {
        return nullptr;
      }
      dropOldest(*maps, surplus, 1);
    }
    maps.unlock();
    const auto map = SharedMap::open(pid, entry.fd, entry.region, entry.size);
    if (map == nullptr) {
      return nullptr;
    }
    return use(*maps_.lock(), pid, map);
  }

  // Drops the unused maps for which `unwanted` is true. Returns how many maps
  // are left, used and unused.
  template <typename Predicate>
  size_t drop(Predicate&& unwanted) {
    std::vector<Idle> surplus; // unmapped after the unlock
    const auto maps = maps_.lock();
    const auto rest = std::stable_partition(
        maps->idle.begin(), maps->idle.end(), [&](const Idle& idle) {
          return !unwanted(idle);
        });
    surplus.assign(rest, maps->idle.end());
    maps->idle.erase(rest, maps->idle.end());
    for (const Idle& idle : surplus) {
      maps->idleBytes -= idle.map->size();
    }
    return maps->idle.size() + maps->used.size();
  }

  struct Idle {
    int32_t pid;
    std::shared_ptr<SharedMap> map;
    Clock::time_point since;
  };

 private:
  struct Used {
    int32_t pid;
    const SharedMap* map; // lives until its last user has given it back
    std::weak_ptr<SharedMap> users;
  };
  struct Maps {
    std::vector<Idle> idle; // by age, the oldest first
    size_t idleBytes = 0;
    std::vector<Used> used;
  };

  // Gives a map back when its last user is gone.
  struct User {
    User() = default;
    ~User() {
      if (map != nullptr) {
        state->giveBack(pid, map);
      }
    }
    User(const User&) = delete;
    User& operator=(const User&) = delete;

    std::shared_ptr<State> state;
    int32_t pid = 0;
    std::shared_ptr<SharedMap> map = nullptr;
  };

  std::shared_ptr<SharedMap>
  use(Maps& maps, int32_t pid, const std::shared_ptr<SharedMap>& map) {
    const auto user = std::make_shared<User>();
    maps.used.reserve(maps.used.size() + 1);
    // Nothing below throws: an exception would give the map back, which needs
    // the lock that this thread has.
    user->state = shared_from_this();
    user->pid = pid;
    user->map = map;
    const std::shared_ptr<SharedMap> users(user, map.get());
    maps.used.push_back({pid, map.get(), users});
    return users;
  }

  // For a destructor. If there is no memory for the note, the map is not kept
  // for its next use.
  void giveBack(int32_t pid, const std::shared_ptr<SharedMap>& map) noexcept {
    try {
      keep(pid, map);
    } catch (const std::bad_alloc&) {
    }
  }

  void keep(int32_t pid, const std::shared_ptr<SharedMap>& map) {
    if (!home_.isHere()) {
      return; // a thread of the parent may have locked maps_ at the fork
    }
    std::vector<Idle> surplus; // unmapped after the unlock
    const auto maps = maps_.lock();
    std::erase_if(
        maps->used, [&map](const Used& used) { return used.map == map.get(); });
    if (map->discarded()) {
      return;
    }
    maps->idle.push_back({pid, map, Clock::now()});
    maps->idleBytes += map->size();
    size_t count = 0;
    for (uint64_t left = maps->idleBytes; left > kMaxIdleBytes; ++count) {
      left -= maps->idle[count].map->size();
    }
    dropOldest(*maps, surplus, count);
  }

  static void dropOldest(Maps& maps, std::vector<Idle>& surplus, size_t count) {
    const auto end = maps.idle.begin() + static_cast<ptrdiff_t>(count);
    surplus.assign(maps.idle.begin(), end);
    maps.idle.erase(maps.idle.begin(), end);
    for (const Idle& idle : surplus) {
      maps.idleBytes -= idle.map->size();
    }
  }

  const base::HomeProcess home_;
  base::Synchronized<Maps> maps_;
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
