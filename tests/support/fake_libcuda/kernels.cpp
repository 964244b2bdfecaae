#include "support/fake_libcuda/fake.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// Modules and launches. The driver knows the kernels of torch_rpc_ext/kernels
// by their names, and does what each kernel should do, one element after the
// other.

namespace {

constexpr const char* kPrefix = "torch_rpc_ext_";
constexpr size_t kDims = 8;

struct Module {
  std::string ptx;
};

struct Function {
  std::string name; // without the prefix
};

struct Row {
  int64_t source, destination, elements, firstChunk;
};

int64_t dividedUp(int64_t count, int64_t by) {
  return (count + by - 1) / by;
}

void copy(int64_t destination, int64_t source, int64_t size) {
  std::memcpy(
      reinterpret_cast<void*>(destination),
      reinterpret_cast<const void*>(source),
      static_cast<size_t>(size));
}

bool hasCast(const std::string& name) {
  return name.find("_to_") != std::string::npos;
}

// Does not handle NaNs, which would need more code.
void castOne(const std::string& name, int64_t destination, int64_t source) {
  if (name.ends_with("float32_to_bfloat16")) {
    uint32_t bits = 0;
    std::memcpy(&bits, reinterpret_cast<const void*>(source), sizeof(bits));
    bits += 0x7fff + (bits >> 16 & 1); // to nearest, ties to even
    const auto upper = static_cast<uint16_t>(bits >> 16);
    std::memcpy(reinterpret_cast<void*>(destination), &upper, sizeof(upper));
  } else if (name.ends_with("float32_to_float16")) {
    float wide = 0;
    std::memcpy(&wide, reinterpret_cast<const void*>(source), sizeof(wide));
    const auto half = static_cast<_Float16>(wide);
    std::memcpy(reinterpret_cast<void*>(destination), &half, sizeof(half));
  } else if (name.ends_with("bfloat16_to_float32")) {
    copy(destination + 2, source, 2);
    std::memset(reinterpret_cast<void*>(destination), 0, 2);
  } else {
    _Float16 half = 0;
    std::memcpy(&half, reinterpret_cast<const void*>(source), sizeof(half));
    const auto wide = static_cast<float>(half);
    std::memcpy(reinterpret_cast<void*>(destination), &wide, sizeof(wide));
  }
}

void segments(const std::string& name, const int64_t* arguments) {
  const auto* rows = reinterpret_cast<const Row*>(arguments[0]);
  int64_t chunks = 0;
  for (int64_t i = 0; i < arguments[1]; ++i) {
    const Row& row = rows[i];
    if (row.firstChunk != chunks) {
      std::abort(); // the table is wrong
    }
    chunks += dividedUp(row.elements, arguments[3]);
    if (!hasCast(name)) {
      copy(row.destination, row.source, row.elements);
      continue;
    }
    const bool widens = name.ends_with("float32");
    for (int64_t at = 0; at < row.elements; ++at) {
      castOne(
          name,
          row.destination + at * (widens ? 4 : 2),
          row.source + at * (widens ? 2 : 4));
    }
  }
  if (chunks != arguments[2]) {
    std::abort();
  }
}

void strided(const std::string& name, const int64_t* arguments) {
  const int64_t* sizes = arguments + 3;
  const int64_t* sourceStrides = sizes + kDims;
  const int64_t* destinationStrides = sourceStrides + kDims;
  const int64_t width =
      hasCast(name) ? 0 : std::stoll(name.substr(name.find('_') + 1));
  for (int64_t element = 0; element < arguments[2]; ++element) {
    int64_t left = element;
    int64_t source = arguments[0];
    int64_t destination = arguments[1];
    for (size_t dim = 0; dim < kDims; ++dim) {
      const int64_t position = left % sizes[dim];
      left /= sizes[dim];
      source += position * sourceStrides[dim];
      destination += position * destinationStrides[dim];
    }
    if (width == 0) {
      castOne(name, destination, source);
    } else {
      copy(destination, source, width);
    }
  }
}

uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

void checksum(const int64_t* arguments) {
  const int64_t size = arguments[1];
  uint64_t total = mix(static_cast<uint64_t>(size));
  for (int64_t i = 0; i * 8 < size; ++i) {
    uint64_t word = 0;
    std::memcpy(
        &word,
        reinterpret_cast<const char*>(arguments[0]) + i * 8,
        static_cast<size_t>(std::min<int64_t>(8, size - i * 8)));
    total += mix(word + static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15);
  }
  *reinterpret_cast<uint64_t*>(arguments[2]) += total;
}

} // namespace

size_t fake::argumentsOf(const std::string& name) {
  if (name.starts_with("segments")) {
    return 4;
  }
  if (name.starts_with("strided_")) {
    return 3 + 3 * kDims;
  }
  return name == "checksum" ? 3 : 0;
}

bool fake::runKernel(const std::string& name, const int64_t* arguments) {
  if (name.starts_with("segments")) {
    segments(name, arguments);
  } else if (name.starts_with("strided_")) {
    strided(name, arguments);
  } else if (name == "checksum") {
    checksum(arguments);
  } else {
    return false;
  }
  return true;
}

CUresult CUDAAPI cuModuleLoadDataEx(
    CUmodule* module,
    const void* image,
    unsigned count,
    CUjit_option* options,
    void** values) {
  FAKE_ENTER("")
  const auto* ptx = static_cast<const char*>(image);
  if (std::strstr(ptx, ".version ") == nullptr) {
    for (unsigned i = 0; i < count; ++i) {
      if (options[i] == CU_JIT_ERROR_LOG_BUFFER) {
        std::strcpy(static_cast<char*>(values[i]), "ptxas: no version");
      }
    }
    return CUDA_ERROR_INVALID_PTX;
  }
  *module = reinterpret_cast<CUmodule>(new Module{ptx});
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  FAKE_ENTER("")
  delete reinterpret_cast<Module*>(module);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI
cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  FAKE_ENTER(name)
  const std::string& ptx = reinterpret_cast<Module*>(module)->ptx;
  const std::string entry = std::string(".visible .entry ") + name + "(";
  const std::string text = name;
  if (ptx.find(entry) == std::string::npos || !text.starts_with(kPrefix)) {
    return CUDA_ERROR_NOT_FOUND;
  }
  // Never freed: there are only a few functions.
  *function = reinterpret_cast<CUfunction>(
      new Function{text.substr(std::strlen(kPrefix))});
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchKernel(
    CUfunction function,
    unsigned gridX,
    unsigned gridY,
    unsigned gridZ,
    unsigned blockX,
    unsigned blockY,
    unsigned blockZ,
    unsigned sharedBytes,
    CUstream stream,
    void** arguments,
    void** extra) {
  const std::string name = reinterpret_cast<Function*>(function)->name;
  std::vector<int64_t> values;
  std::string shown = name + " grid " + std::to_string(gridX) + " block " +
      std::to_string(blockX) + ":";
  for (size_t i = 0; i < fake::argumentsOf(name); ++i) {
    values.push_back(*static_cast<const int64_t*>(arguments[i]));
    shown += " " + std::to_string(values.back());
  }
  FAKE_ENTER(shown)
  const bool isPlain = gridY == 1 && gridZ == 1 && blockY == 1 && blockZ == 1 &&
      sharedBytes == 0 && extra == nullptr;
  if (values.empty() || !isPlain) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return fake::enqueueLate(
      stream, [name, values] { fake::runKernel(name, values.data()); });
}
