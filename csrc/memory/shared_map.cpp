#include "memory/shared_map.h"

#include "base/log.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <string_view>

namespace torch_rpc_ext::memory {

namespace {

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

uint64_t randomId() {
  // The caller has locked the mutex of AllMaps.
  static std::mt19937_64 source{std::random_device{}()};
  uint64_t id = 0;
  while (id == 0) {
    id = source();
  }
  return id;
}

// The name of a region's memfd. A process gives the number of a descriptor that
// it has closed to the next one, so the number alone may mean another region.
std::string nameOf(uint64_t id) {
  std::array<char, 40> name{};
  std::snprintf(name.data(), name.size(), "torch_rpc_ext-%016" PRIx64, id);
  return name.data();
}

int makeRegion(uint64_t id, size_t size) {
  const int fd =
      ::memfd_create(nameOf(id).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd >= 0 &&
      (::ftruncate(fd, static_cast<off_t>(size)) != 0 ||
       ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) !=
           0)) {
    ::close(fd);
    return -1;
  }
  return fd;
}

bool isRegion(const std::string& path, uint64_t id) {
  const std::string wanted = "/memfd:" + nameOf(id);
  std::array<char, 64> target{};
  const ssize_t length = ::readlink(path.c_str(), target.data(), target.size());
  return length >= 0 &&
      std::string_view(target.data(), length).starts_with(wanted);
}

// Opens a descriptor of another process; -1 if that fails, or if the descriptor
// is not the region's. isRegion() is asked before the descriptor is opened,
// because opening a pipe could block and opening a device may have any effect;
// and again afterwards, because the other process may have given the number to
// another descriptor meanwhile.
int openRegion(int32_t pid, uint64_t number, uint64_t id) {
  const std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  if (!isRegion(path, id)) {
    return -1;
  }
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd >= 0 && !isRegion("/proc/self/fd/" + std::to_string(fd), id)) {
    ::close(fd);
    return -1;
  }
  return fd;
}

// The size of a memfd; 0 if it is not sealed against shrinking: its owner could
// then truncate it, and a read here would raise SIGBUS.
size_t sealedSize(int fd) {
  struct stat info{};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(fd, &info) == 0
      ? static_cast<size_t>(info.st_size)
      : 0;
}

void* mapRegion(int fd, size_t size, bool isPrivate) {
  const int kind = isPrivate ? MAP_PRIVATE : MAP_SHARED;
  void* const data = ::mmap(nullptr, size, kReadWrite, kind, fd, 0);
  if (data == MAP_FAILED) {
    return nullptr;
  }
  // A child of a fork gets its own copy of what is private.
  if (!isPrivate && ::madvise(data, size, MADV_DONTFORK) != 0) {
    ::munmap(data, size);
    return nullptr;
  }
  return data;
}

} // namespace

// The list of all maps. fork() takes the mutex, so that during a fork no map is
// made or destroyed, and none gets its first Hold or loses its last.
class SharedMap::AllMaps {
 public:
  AllMaps() {
    // The handlers allocate no memory, except to log a failure.
    ::pthread_atfork(
        []() noexcept { all().prepare(); },
        []() noexcept { all().mutex_.unlock(); },
        []() noexcept { all().begin(); });
  }

  std::mutex& mutex() {
    return mutex_;
  }

  // The caller has locked mutex(). Takes ownership of `fd`, and closes it if it
  // cannot be mapped; returns null then.
  SharedMap*
  add(int fd, size_t size, uint64_t id, bool foreign, bool isPrivate) {
    void* const data = mapRegion(fd, size, isPrivate);
    auto* const map = data == nullptr
        ? nullptr
        : new (std::nothrow)
              SharedMap(data, size, {id, fd}, foreign, isPrivate);
    if (map == nullptr) {
      if (data != nullptr) {
        ::munmap(data, size);
      }
      ::close(fd);
      return nullptr;
    }
    map->next_ = first_;
    if (first_ != nullptr) {
      first_->previous_ = map;
    }
    first_ = map;
    return map;
  }

  void remove(SharedMap& map) {
    (map.previous_ != nullptr ? map.previous_->next_ : first_) = map.next_;
    if (map.next_ != nullptr) {
      map.next_->previous_ = map.previous_;
    }
  }

 private:
  // In the parent, before the fork; the mutex stays locked until after it.
  void prepare() {
    mutex_.lock();
    for (SharedMap* map = first_; map != nullptr; map = map->next_) {
      if (map->holds_ == 0) {
        continue;
      }
      if (map->isPrivate()) {
        // The child still reads from the memfd those pages to which neither
        // process writes.
        map->discard();
      } else {
        map->makePrivate();
      }
    }
  }

  // In the child, after the fork.
  void begin() {
    for (SharedMap* map = first_; map != nullptr; map = map->next_) {
      map->leaveBehind();
    }
    mutex_.unlock();
  }

  std::mutex mutex_;
  SharedMap* first_ = nullptr;
};

SharedMap::AllMaps& SharedMap::all() {
  // Never destroyed: tensors may be destroyed after all static objects.
  static auto* const maps = new AllMaps();
  return *maps;
}

std::shared_ptr<SharedMap> SharedMap::create(size_t size) {
  std::unique_lock lock(all().mutex());
  const uint64_t id = randomId();
  const int fd = makeRegion(id, size);
  SharedMap* const map = fd < 0
      ? nullptr
      : all().add(fd, size, id, /*foreign=*/false, /*isPrivate=*/false);
  lock.unlock();
  return std::shared_ptr<SharedMap>(map);
}

std::shared_ptr<SharedMap> SharedMap::open(
    int32_t pid,
    uint64_t number,
    uint64_t id,
    size_t size,
    bool isPrivate) {
  std::unique_lock lock(all().mutex());
  const int fd = openRegion(pid, number, id);
  if (fd < 0) {
    return nullptr;
  }
  const size_t bytes = sealedSize(fd);
  if (bytes == 0 || bytes < size) {
    ::close(fd);
    return nullptr;
  }
  SharedMap* const map = all().add(fd, bytes, id, /*foreign=*/true, isPrivate);
  lock.unlock();
  return std::shared_ptr<SharedMap>(map);
}

SharedMap::~SharedMap() {
  {
    std::lock_guard lock(all().mutex());
    all().remove(*this);
    if (region_.fd >= 0) {
      ::close(region_.fd);
    }
  }
  if (data_ != nullptr) {
    ::munmap(data_, size_); // outside of the lock: may take milliseconds
  }
}

// Makes a private mapping elsewhere and moves it onto the shared one by
// mremap(). mmap() with MAP_FIXED would be shorter, but where it fails for lack
// of memory it may leave nothing mapped there. Other threads may read and write
// meanwhile: their writes go to the memfd, whose pages the private mapping
// shows.
void SharedMap::makePrivate() {
  // Before the move, so that a thread that writes to a private page, and so not
  // to the memfd, can see by discarded() that the memfd lacks these bytes.
  discard();
  void* const map =
      ::mmap(nullptr, size_, kReadWrite, MAP_PRIVATE, region_.fd, 0);
  if (map != MAP_FAILED) {
    private_ =
        ::mremap(map, size_, size_, MREMAP_MAYMOVE | MREMAP_FIXED, data_) !=
        MAP_FAILED;
  }
  if (private_) {
    return;
  }
  const int error = errno;
  if (map != MAP_FAILED) {
    ::munmap(map, size_);
  }
  // The child's tensors must have some memory: better shared than none.
  ::madvise(data_, size_, MADV_DOFORK);
  base::log(
      base::LogLevel::kWarning,
      "a tensor of up to " + std::to_string(size_) +
          " bytes is shared with the child of a fork, which sees what is "
          "written to it: " +
          std::strerror(error));
}

// In the child: drops what it must not have. Without a Hold the map has not
// been copied to the child at all (MADV_DONTFORK).
void SharedMap::leaveBehind() {
  if (holds_ == 0) {
    data_ = nullptr;
  }
  if (region_.fd >= 0) {
    ::close(region_.fd);
  }
  region_ = {};
  discard();
}

SharedMap::Hold::Hold(SharedMap* map) : map_(map) {
  if (map_ != nullptr) {
    std::lock_guard lock(all().mutex());
    ++map_->holds_;
  }
}

SharedMap::Hold::~Hold() {
  if (map_ != nullptr) {
    std::lock_guard lock(all().mutex());
    --map_->holds_;
  }
}

} // namespace torch_rpc_ext::memory
