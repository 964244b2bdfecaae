#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// The part of the CUDA driver's binary interface that csrc uses. It is declared
// without cuda.h, so that the build needs no CUDA. NVIDIA keeps this interface
// stable: a function that changes gets a new name (_v2).
// tests/unit/test_cuda_driver.py compares this file with a cuda.h.
namespace torch_rpc_ext::cuda {

using Status = int; // CUresult
using DeviceId = int; // CUdevice
using Address = uint64_t; // CUdeviceptr, or, thanks to UVA, any host pointer
using ContextHandle = struct CUctx_st*;
using StreamHandle = struct CUstream_st*;
using EventHandle = struct CUevent_st*;
using ModuleHandle = struct CUmod_st*;
using FunctionHandle = struct CUfunc_st*;

struct Uuid {
  std::array<char, 16> bytes{};

  bool operator==(const Uuid&) const = default;
};

struct IpcMemoryHandle {
  std::array<std::byte, 64> bytes{};

  bool operator==(const IpcMemoryHandle&) const = default;
};

// Values of the driver's enumerations, under cuda.h's names without CU_.
namespace status {
inline constexpr Status kSuccess = 0;
inline constexpr Status kOutOfMemory = 2;
inline constexpr Status kDeinitialized = 4;
inline constexpr Status kNoDevice = 100;
inline constexpr Status kInvalidDevice = 101;
inline constexpr Status kPeerAccessUnsupported = 217;
inline constexpr Status kUnsupportedPtxVersion = 222;
inline constexpr Status kNotPermitted = 800;
inline constexpr Status kNotSupported = 801;
inline constexpr Status kSystemNotReady = 802;
inline constexpr Status kSystemDriverMismatch = 803;
} // namespace status

inline constexpr int kAttributeComputeCapabilityMajor = 75;
inline constexpr int kAttributeComputeCapabilityMinor = 76;
inline constexpr int kPointerBufferId = 7;
inline constexpr int kPointerIsLegacyIpcCapable = 10;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kIpcLazyEnablePeerAccess = 1;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr int kJitErrorLogBuffer = 5;
inline constexpr int kJitErrorLogBufferBytes = 6;

// X(member, symbol, parameters): all functions, each returning a Status.
#define TORCH_RPC_EXT_CUDA_FUNCTIONS(X)                                        \
  X(init, cuInit, (unsigned flags))                                            \
  X(driverVersion, cuDriverGetVersion, (int* version))                         \
  X(errorName, cuGetErrorName, (Status status, const char** name))             \
  X(errorText, cuGetErrorString, (Status status, const char** text))           \
  X(deviceCount, cuDeviceGetCount, (int* count))                               \
  X(device, cuDeviceGet, (DeviceId * device, int ordinal))                     \
  X(deviceUuid, cuDeviceGetUuid_v2, (Uuid * uuid, DeviceId device))            \
  X(physicalUuid, cuDeviceGetUuid, (Uuid * uuid, DeviceId device))             \
  X(deviceAttribute,                                                           \
    cuDeviceGetAttribute,                                                      \
    (int* value, int attribute, DeviceId device))                              \
  X(retainPrimaryContext,                                                      \
    cuDevicePrimaryCtxRetain,                                                  \
    (ContextHandle * context, DeviceId device))                                \
  X(releasePrimaryContext, cuDevicePrimaryCtxRelease_v2, (DeviceId device))    \
  X(pushContext, cuCtxPushCurrent_v2, (ContextHandle context))                 \
  X(popContext, cuCtxPopCurrent_v2, (ContextHandle * context))                 \
  X(addressRange,                                                              \
    cuMemGetAddressRange_v2,                                                   \
    (Address * base, size_t* size, Address address))                           \
  X(pointerAttribute,                                                          \
    cuPointerGetAttribute,                                                     \
    (void* value, int attribute, Address address))                             \
  X(allocate, cuMemAlloc_v2, (Address * address, size_t size))                 \
  X(free, cuMemFree_v2, (Address address))                                     \
  X(allocatePinned,                                                            \
    cuMemHostAlloc,                                                            \
    (void** address, size_t size, unsigned flags))                             \
  X(freePinned, cuMemFreeHost, (void* address))                                \
  X(copyAsync,                                                                 \
    cuMemcpyAsync,                                                             \
    (Address destination, Address source, size_t size, StreamHandle stream))   \
  X(setBytesAsync,                                                             \
    cuMemsetD8Async,                                                           \
    (Address address, unsigned char value, size_t count, StreamHandle stream)) \
  X(exportMemory,                                                              \
    cuIpcGetMemHandle,                                                         \
    (IpcMemoryHandle * handle, Address address))                               \
  X(openMemory,                                                                \
    cuIpcOpenMemHandle_v2,                                                     \
    (Address * address, IpcMemoryHandle handle, unsigned flags))               \
  X(closeMemory, cuIpcCloseMemHandle, (Address address))                       \
  X(createEvent, cuEventCreate, (EventHandle * event, unsigned flags))         \
  X(destroyEvent, cuEventDestroy_v2, (EventHandle event))                      \
  X(recordEvent, cuEventRecord, (EventHandle event, StreamHandle stream))      \
  X(queryEvent, cuEventQuery, (EventHandle event))                             \
  X(createStream, cuStreamCreate, (StreamHandle * stream, unsigned flags))     \
  X(destroyStream, cuStreamDestroy_v2, (StreamHandle stream))                  \
  X(synchronizeStream, cuStreamSynchronize, (StreamHandle stream))             \
  X(loadModule,                                                                \
    cuModuleLoadDataEx,                                                        \
    (ModuleHandle * module,                                                    \
     const void* image,                                                        \
     unsigned count,                                                           \
     int* options,                                                             \
     void** values))                                                           \
  X(unloadModule, cuModuleUnload, (ModuleHandle module))                       \
  X(getFunction,                                                               \
    cuModuleGetFunction,                                                       \
    (FunctionHandle * function, ModuleHandle module, const char* name))        \
  X(launchKernel,                                                              \
    cuLaunchKernel,                                                            \
    (FunctionHandle function,                                                  \
     unsigned gridX,                                                           \
     unsigned gridY,                                                           \
     unsigned gridZ,                                                           \
     unsigned blockX,                                                          \
     unsigned blockY,                                                          \
     unsigned blockZ,                                                          \
     unsigned sharedBytes,                                                     \
     StreamHandle stream,                                                      \
     void** arguments,                                                         \
     void** extra))

// The functions of one loaded driver, by our names.
struct DriverApi {
#define TORCH_RPC_EXT_CUDA_MEMBER(member, symbol, parameters) \
  Status(*member) parameters = nullptr;
  TORCH_RPC_EXT_CUDA_FUNCTIONS(TORCH_RPC_EXT_CUDA_MEMBER)
#undef TORCH_RPC_EXT_CUDA_MEMBER
};

} // namespace torch_rpc_ext::cuda
