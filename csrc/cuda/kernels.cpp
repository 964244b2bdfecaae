#include "cuda/kernels.h"

#include <algorithm>
#include <array>
#include <vector>

namespace torch_rpc_ext::cuda {

namespace {

// The same values as in torch_rpc_ext/kernels/launch.py.
constexpr unsigned kThreads = 256;
constexpr uint64_t kMaxBlocks = 4096;
constexpr int64_t kChunkElements = 1 << 16;

uint64_t blocksFor(uint64_t threads) {
  return (threads + kThreads - 1) / kThreads;
}

void append(
    std::vector<int64_t>& arguments,
    const std::array<int64_t, kMaxDims>& values) {
  arguments.insert(arguments.end(), values.begin(), values.end());
}

} // namespace

Kernels::Kernels(std::shared_ptr<Driver> driver, PtxSource source)
    : driver_(std::move(driver)),
      source_(std::move(source)),
      tables_(driver_) {}

Kernels::~Kernels() {
  const auto all = loaded_.lock();
  for (const auto& [key, loaded] : *all) {
    unload(key.first, loaded);
  }
}

base::Error Kernels::prepare(int device, const std::string& kernel) {
  const auto function = find(device, kernel);
  return function.ok() ? base::Error{} : function.error();
}

base::Error Kernels::segments(
    int device,
    StreamHandle stream,
    std::span<const Segment> segments,
    Cast cast) {
  const std::string name = segmentsName(cast);
  auto function = find(device, name);
  if (!function.ok()) {
    return function.error();
  }
  const ContextGuard guard(*driver_, device);
  if (guard.error()) {
    return guard.error();
  }
  while (!segments.empty()) {
    const auto some =
        segments.first(std::min(segments.size(), TablePool::kRows));
    segments = segments.subspan(some.size());
    if (auto error =
            launchTable(device, stream, some, function.value(), name)) {
      return error;
    }
  }
  return {};
}

base::Error Kernels::launchTable(
    int device,
    StreamHandle stream,
    std::span<const Segment> segments,
    FunctionHandle function,
    const std::string& name) {
  auto taken = tables_.take(device);
  if (!taken.ok()) {
    return taken.error();
  }
  const TablePool::Place& place = taken.value();
  const int64_t chunks = writeTable(segments, kChunkElements, place.rows);
  base::Error error;
  if (chunks != 0) {
    error = tables_.upload(place, segments.size(), stream);
    if (!error) {
      std::array<int64_t, 4> arguments{
          static_cast<int64_t>(place.table),
          static_cast<int64_t>(segments.size()),
          chunks,
          kChunkElements};
      error = launch(
          function, stream, static_cast<uint64_t>(chunks), arguments, name);
    }
  }
  tables_.giveBack(place, stream);
  return error;
}

base::Error Kernels::strided(
    int device,
    StreamHandle stream,
    const StridedCopy& copy,
    Cast cast) {
  if (copy.elements == 0) {
    return {};
  }
  const std::string name = stridedName(copy, cast);
  auto function = find(device, name);
  if (!function.ok()) {
    return function.error();
  }
  const ContextGuard guard(*driver_, device);
  if (guard.error()) {
    return guard.error();
  }
  std::vector<int64_t> arguments{copy.source, copy.destination, copy.elements};
  append(arguments, copy.sizes);
  append(arguments, copy.sourceStrides);
  append(arguments, copy.destinationStrides);
  return launch(
      function.value(),
      stream,
      blocksFor(static_cast<uint64_t>(copy.elements)),
      arguments,
      name);
}

base::Error Kernels::checksum(
    int device,
    StreamHandle stream,
    Address source,
    uint64_t bytes,
    Address result) {
  auto function = find(device, "checksum");
  if (!function.ok()) {
    return function.error();
  }
  const ContextGuard guard(*driver_, device);
  if (guard.error()) {
    return guard.error();
  }
  if (auto error = driver_->check(
          driver_->api().setBytesAsync(result, 0, sizeof(int64_t), stream),
          "cuMemsetD8Async")) {
    return error;
  }
  std::array<int64_t, 3> arguments{
      static_cast<int64_t>(source),
      static_cast<int64_t>(bytes),
      static_cast<int64_t>(result)};
  const uint64_t words = bytes / 8 + 1;
  return launch(
      function.value(), stream, blocksFor(words), arguments, "checksum");
}

base::Result<FunctionHandle> Kernels::find(
    int device,
    const std::string& name) {
  const Key key{device, name};
  {
    const auto all = loaded_.lock();
    const auto found = all->find(key);
    if (found != all->end()) {
      return found->second.function;
    }
  }
  // Not under the mutex, because load() takes the GIL. So two threads may load
  // the same kernel, and one of them unloads its copy again below.
  Loaded loaded = load(device, name);
  if (!loaded.function.ok() &&
      loaded.function.error().kind == base::ErrorKind::kOverloaded) {
    return loaded.function; // not remembered: there may be memory next time
  }
  auto all = loaded_.lock();
  const auto [entry, isNew] = all->emplace(key, loaded);
  if (!isNew) {
    unload(device, loaded);
  }
  return entry->second.function;
}

Kernels::Loaded Kernels::load(int device, const std::string& name) {
  const ContextGuard guard(*driver_, device);
  if (guard.error()) {
    return {nullptr, guard.error()};
  }
  const Device& gpu = driver_->devices()[static_cast<size_t>(device)];
  auto ptx = source_(name, gpu.major, gpu.minor);
  if (!ptx.ok()) {
    return {nullptr, ptx.error()};
  }
  const DriverApi& api = driver_->api();
  std::array<char, 4096> log{};
  std::array<int, 2> options{kJitErrorLogBuffer, kJitErrorLogBufferBytes};
  std::array<void*, 2> values{
      log.data(), reinterpret_cast<void*>(uintptr_t{log.size() - 1})};
  ModuleHandle module = nullptr;
  const Status status = api.loadModule(
      &module,
      ptx.value().text.c_str(),
      options.size(),
      options.data(),
      values.data());
  if (status != status::kSuccess) {
    base::Error why = driver_->error(status, "loading kernel " + name);
    why.message += log[0] != '\0' ? std::string(": ") + log.data() : "";
    return {nullptr, std::move(why)};
  }
  FunctionHandle function = nullptr;
  if (auto error = driver_->check(
          api.getFunction(&function, module, ptx.value().entry.c_str()),
          "finding kernel " + ptx.value().entry)) {
    return {module, std::move(error)};
  }
  return {module, function};
}

void Kernels::unload(int device, const Loaded& loaded) {
  const ContextGuard guard(*driver_, device);
  if (!guard.error() && loaded.module != nullptr) {
    driver_->api().unloadModule(loaded.module);
  }
}

base::Error Kernels::launch(
    FunctionHandle function,
    StreamHandle stream,
    uint64_t blocks,
    std::span<int64_t> arguments,
    const std::string& name) {
  std::array<void*, 32> places{};
  for (size_t i = 0; i < arguments.size(); ++i) {
    places.at(i) = &arguments[i];
  }
  const auto grid =
      static_cast<unsigned>(std::clamp<uint64_t>(blocks, 1, kMaxBlocks));
  return driver_->check(
      driver_->api().launchKernel(
          function,
          grid,
          1,
          1,
          kThreads,
          1,
          1,
          /*sharedBytes=*/0,
          stream,
          places.data(),
          nullptr),
      "launching kernel " + name);
}

} // namespace torch_rpc_ext::cuda
