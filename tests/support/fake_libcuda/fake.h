#pragma once

// A fake CUDA driver, which needs no GPU: the functions of libcuda.so.1 that
// csrc/cuda uses, with NVIDIA's own declarations. Device memory and events are
// memfds, so that other processes can open them; a stream is a thread.
//
// Environment variables, read once:
//   FAKE_CUDA_UUIDS       a letter for each device (default "a"); a capital
//                         letter makes the device a MIG slice
// Tests call the functions at the end of this file by ctypes.

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>

namespace fake {

// Records a call. Returns the error that a test has ordered for it, if any.
CUresult enter(const char* name, const std::string& arguments);

struct Gpu {
  char letter;
  CUcontext context() const {
    return reinterpret_cast<CUcontext>(const_cast<Gpu*>(this));
  }
};
Gpu* gpu(int ordinal); // null if there is none
Gpu* current(); // the GPU of this thread's context, or null
int ordinalOf(const Gpu* gpu);

// Queues work; on the calling thread's device if the stream is the default one.
CUresult enqueue(CUstream stream, std::function<void()> work);
CUresult enqueueLate(CUstream stream, std::function<void()> work);

// The content of an IPC handle of memory or of an event; both have 64 bytes.
struct Shared {
  uint32_t magic = 0;
  int32_t pid = 0;
  int32_t fd = -1;
  int32_t letter = 0; // of the device
  uint64_t size = 0;
  uint64_t id = 0; // of the allocation; unique in its process
};
template <typename Handle>
Handle pack(const Shared& shared) {
  static_assert(sizeof(Shared) <= sizeof(Handle));
  Handle handle{};
  std::memcpy(&handle, &shared, sizeof(shared));
  return handle;
}
template <typename Handle>
Shared unpack(const Handle& handle) {
  Shared shared;
  std::memcpy(static_cast<void*>(&shared), &handle, sizeof(shared));
  return shared;
}
int makeMemfd(size_t size);
void* mapFile(int fd, size_t size, void* wanted);
void* mapPeer(const Shared& shared, uint32_t magic);

// Runs a kernel of torch_rpc_ext/kernels; false if it is not known.
bool runKernel(const std::string& name, const int64_t* arguments);
size_t argumentsOf(const std::string& name); // 0 if it is not known

} // namespace fake

#define FAKE_ENTER(arguments)                                       \
  if (const CUresult injected = fake::enter(__func__, arguments)) { \
    return injected;                                                \
  }                                                                 \
  if (fake::current() == nullptr) {                                 \
    return CUDA_ERROR_INVALID_CONTEXT;                              \
  }

extern "C" {
// The calls so far, one in each line: the name and the arguments that matter.
// The text is valid until the next call of this function.
const char* fakeCudaCalls();
void fakeCudaForgetCalls();
// From now on the function returns this error, `times` times.
void fakeCudaFail(const char* function, int error, int times);
// While held, the streams of this process do nothing.
void fakeCudaHold(int isHeld);
// Whether memory allocated from now on can be exported.
void fakeCudaExportable(int isExportable);
// Allocations claim to be `factor` times as large as they are.
void fakeCudaExaggerate(int factor);
// From now on copies and kernels run this much later.
void fakeCudaDelay(int microseconds);

// For tests/support/fake_cuda, which makes its streams and device memory with
// this driver.
void* fakeCudaStream();
void fakeCudaEnqueue(void* stream, void (*run)(void*), void* argument);
void fakeCudaDrain(void* stream);
void* fakeCudaAllocate(int device, size_t size);
void fakeCudaFree(int device, void* address);
}
