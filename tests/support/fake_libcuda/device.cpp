#include "support/fake_libcuda/fake.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

thread_local std::vector<fake::Gpu*> stack;

std::vector<fake::Gpu>& gpus() {
  static std::vector<fake::Gpu> all = [] {
    const char* letters = std::getenv("FAKE_CUDA_UUIDS");
    std::vector<fake::Gpu> made;
    for (const char letter : std::string(letters != nullptr ? letters : "a")) {
      made.push_back({letter});
    }
    return made;
  }();
  return all;
}

} // namespace

fake::Gpu* fake::gpu(int ordinal) {
  auto& all = gpus();
  const bool isThere =
      ordinal >= 0 && static_cast<size_t>(ordinal) < all.size();
  return isThere ? &all[ordinal] : nullptr;
}

fake::Gpu* fake::current() {
  return stack.empty() ? nullptr : stack.back();
}

int fake::ordinalOf(const Gpu* gpu) {
  return static_cast<int>(gpu - gpus().data());
}

CUresult CUDAAPI cuInit(unsigned) {
  if (const CUresult error = fake::enter(__func__, "")) {
    return error;
  }
  return gpus().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_ERROR_INVALID_VALUE:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return CUDA_SUCCESS;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NO_DEVICE:
      *name = "CUDA_ERROR_NO_DEVICE";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_CONTEXT:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      return CUDA_SUCCESS;
    case CUDA_ERROR_ALREADY_MAPPED:
      *name = "CUDA_ERROR_ALREADY_MAPPED";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_PTX:
      *name = "CUDA_ERROR_INVALID_PTX";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_FOUND:
      *name = "CUDA_ERROR_NOT_FOUND";
      return CUDA_SUCCESS;
    case CUDA_ERROR_ILLEGAL_ADDRESS:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return CUDA_SUCCESS;
    default:
      *name = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  const bool isKnown = error == CUDA_ERROR_OUT_OF_MEMORY;
  *text = isKnown ? "out of memory" : nullptr;
  return isKnown ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  *count = static_cast<int>(gpus().size());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return fake::gpu(ordinal) != nullptr ? CUDA_SUCCESS
                                       : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  std::memset(uuid->bytes, fake::gpu(device)->letter, sizeof(uuid->bytes));
  return CUDA_SUCCESS;
}

// The driver exports this function too, but cuda.h defines its name as that of
// the function above.
#undef cuDeviceGetUuid
extern "C" CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  const int letter = std::tolower(fake::gpu(device)->letter);
  std::memset(uuid->bytes, letter, sizeof(uuid->bytes));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI
cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (const CUresult error = fake::enter(__func__, std::to_string(device))) {
    return error;
  }
  *context = fake::gpu(device)->context();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  return fake::enter(__func__, std::to_string(device));
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  stack.push_back(reinterpret_cast<fake::Gpu*>(context));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  if (stack.empty()) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *context = stack.back()->context();
  stack.pop_back();
  return CUDA_SUCCESS;
}
