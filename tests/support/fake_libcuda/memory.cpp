#include "support/fake_libcuda/fake.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>

namespace {

constexpr uint32_t kMagic = 0xfa4e4e4d;

struct Allocation {
  size_t size;
  uint64_t id;
  int fd; // -1: opened from a peer
  bool isExportable;
  std::pair<int, uint64_t> peer; // pid and id of the exporter's allocation
};

std::mutex mutex;
std::map<CUdeviceptr, Allocation> allocations;
std::multimap<size_t, void*> freed; // by size: these addresses are used again
std::set<std::pair<int, uint64_t>> opened;
uint64_t nextId = 1;
bool exportable = true;
int exaggeration = 1;

// The allocation that an address is in; the caller holds the mutex.
std::map<CUdeviceptr, Allocation>::iterator find(CUdeviceptr address) {
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) {
    return allocations.end();
  }
  --found;
  return address < found->first + found->second.size ? found
                                                     : allocations.end();
}

} // namespace

int fake::makeMemfd(size_t size) {
  const int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
  return fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0 ? fd : -1;
}

void* fake::mapFile(int fd, size_t size, void* wanted) {
  const int fixed = wanted != nullptr ? MAP_FIXED_NOREPLACE : 0;
  void* found = mmap(
      wanted,
      size,
      PROT_READ | PROT_WRITE,
      MAP_SHARED | fixed,
      fd,
      /*offset=*/0);
  if (found == MAP_FAILED && wanted != nullptr) {
    return mapFile(fd, size, nullptr);
  }
  return found == MAP_FAILED ? nullptr : found;
}

void* fake::mapPeer(const Shared& shared, uint32_t magic) {
  if (shared.magic != magic) {
    return nullptr;
  }
  const std::string path = "/proc/" + std::to_string(shared.pid) + "/fd/" +
      std::to_string(shared.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return nullptr;
  }
  struct stat info{};
  void* found = nullptr;
  if (fstat(fd, &info) == 0 &&
      static_cast<uint64_t>(info.st_size) == shared.size) {
    found = mapFile(fd, shared.size, nullptr);
  }
  close(fd);
  return found;
}

void fakeCudaExportable(int isExportable) {
  std::lock_guard lock(mutex);
  exportable = isExportable != 0;
}

void fakeCudaExaggerate(int factor) {
  std::lock_guard lock(mutex);
  exaggeration = factor;
}

void* fakeCudaAllocate(int device, size_t size) {
  CUdeviceptr address = 0;
  CUcontext popped = nullptr;
  cuCtxPushCurrent(fake::gpu(device)->context());
  const CUresult made = cuMemAlloc(&address, size);
  cuCtxPopCurrent(&popped);
  return made == CUDA_SUCCESS ? reinterpret_cast<void*>(address) : nullptr;
}

void fakeCudaFree(int device, void* address) {
  CUcontext popped = nullptr;
  cuCtxPushCurrent(fake::gpu(device)->context());
  cuMemFree(reinterpret_cast<CUdeviceptr>(address));
  cuCtxPopCurrent(&popped);
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, size_t size) {
  FAKE_ENTER(std::to_string(size))
  std::lock_guard lock(mutex);
  void* wanted = nullptr;
  if (const auto old = freed.find(size); old != freed.end()) {
    wanted = old->second;
    freed.erase(old);
  }
  const int fd = fake::makeMemfd(size);
  void* made = fake::mapFile(fd, size, wanted);
  *address = reinterpret_cast<CUdeviceptr>(made);
  allocations[*address] = {size, nextId++, fd, exportable, {}};
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  FAKE_ENTER("")
  std::lock_guard lock(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end() || found->second.fd < 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  void* memory = reinterpret_cast<void*>(address);
  munmap(memory, found->second.size);
  close(found->second.fd);
  freed.emplace(found->second.size, memory);
  allocations.erase(found);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostAlloc(void** address, size_t size, unsigned) {
  FAKE_ENTER(std::to_string(size))
  *address = std::malloc(size);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFreeHost(void* address) {
  FAKE_ENTER("")
  std::free(address);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI
cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  FAKE_ENTER("")
  std::lock_guard lock(mutex);
  const auto found = find(address);
  if (found == allocations.end()) {
    return CUDA_ERROR_NOT_FOUND;
  }
  *base = found->first;
  *size = found->second.size * exaggeration;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerGetAttribute(
    void* value,
    CUpointer_attribute attribute,
    CUdeviceptr address) {
  FAKE_ENTER(std::to_string(attribute))
  std::lock_guard lock(mutex);
  const auto found = find(address);
  if (found == allocations.end()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      std::memcpy(value, &found->second.id, sizeof(uint64_t));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      std::memset(
          value, 0, sizeof(int)); // the driver may write a bool or an int
      std::memcpy(value, &found->second.isExportable, sizeof(bool));
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult CUDAAPI
cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  FAKE_ENTER("")
  std::lock_guard lock(mutex);
  const auto found = find(address);
  if (found == allocations.end() || !found->second.isExportable) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Allocation& one = found->second;
  *handle = fake::pack<CUipcMemHandle>(
      {kMagic, getpid(), one.fd, fake::current()->letter, one.size, one.id});
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle(
    CUdeviceptr* address,
    CUipcMemHandle handle,
    unsigned flags) {
  FAKE_ENTER(std::to_string(flags))
  const fake::Shared shared = fake::unpack(handle);
  if (shared.pid == getpid()) {
    return CUDA_ERROR_INVALID_CONTEXT; // as the driver does
  }
  if (shared.letter != fake::current()->letter) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  std::lock_guard lock(mutex);
  const std::pair<int, uint64_t> peer{shared.pid, shared.id};
  if (opened.count(peer) != 0) {
    return CUDA_ERROR_ALREADY_MAPPED;
  }
  void* found = fake::mapPeer(shared, kMagic);
  if (found == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  opened.insert(peer);
  *address = reinterpret_cast<CUdeviceptr>(found);
  allocations[*address] = {shared.size, nextId++, -1, false, peer};
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
  FAKE_ENTER("")
  std::lock_guard lock(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end() || found->second.fd >= 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  munmap(reinterpret_cast<void*>(address), found->second.size);
  opened.erase(found->second.peer);
  allocations.erase(found);
  return CUDA_SUCCESS;
}
