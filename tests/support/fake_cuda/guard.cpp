// What torch needs of a kind of device: guards, streams, events, allocators.

#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <vector>

namespace fake_cuda {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {c10::kCUDA, currentDevice()};
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(
        device.index() < deviceCount(),
        "CUDA error: invalid device ordinal ",
        device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    currentDevice() = std::max<DeviceIndex>(device.index(), 0);
  }
  Stream getStream(Device device) const override {
    return Runtime::get().current(device.index());
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return Runtime::get().fromPool(device.index());
  }
  // Not every torch that this is built for has this method.
  void* getStreamNativeHandle(const Stream stream) const {
    return Runtime::get().queue(stream).handle();
  }
  Stream getNewStream(Device device, int) const override {
    return Runtime::get().fromPool(device.index());
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    currentStreams()[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag)
      const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->record(Runtime::get().queue(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->block(Runtime::get().queue(stream));
    }
  }
  bool queryEvent(void* event) const override {
    TORCH_CHECK(
        !Runtime::get().settings.broken,
        "CUDA error: an illegal memory access was encountered");
    return event == nullptr || static_cast<Event*>(event)->done();
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    Runtime::get().synchronize(stream);
  }
  void synchronizeEvent(void* event) const override {
    ++Runtime::get().counts.synchronizations;
    if (event != nullptr) {
      static_cast<Event*>(event)->wait();
    }
  }
  void synchronizeDevice(DeviceIndex) const override {
    Runtime::get().synchronizeAll();
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(Runtime::get().settings.devices.load());
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream)
      const override;
};

// What a DataPtr of the device's or the pinned allocator owns.
struct Block {
  void* memory;
  size_t size;
  std::mutex mutex;
  std::vector<Stream> streams; // that use it; first the one it was made for
  bool onDevice;
};

std::atomic<int64_t> usedBytes{0};

void deleteBlock(void* context) {
  auto* const block = static_cast<Block*>(context);
  if (block->onDevice) {
    usedBytes -= static_cast<int64_t>(block->size);
  }
  Runtime::get().release(
      {block->memory, block->size, block->onDevice}, std::move(block->streams));
  delete block;
}

c10::DataPtr
makeBlock(size_t size, Device device, std::vector<Stream> streams) {
  const bool onDevice = !device.is_cpu();
  void* const memory = Runtime::get().allocate(
      onDevice ? std::optional(device.index()) : std::nullopt, size);
  auto* const block = new Block{memory, size, {}, std::move(streams), onDevice};
  return {memory, block, deleteBlock, device};
}

void addStream(Block& block, const Stream& stream) {
  std::lock_guard lock(block.mutex);
  for (const Stream& known : block.streams) {
    if (known == stream) {
      return;
    }
  }
  block.streams.push_back(stream);
}

void GuardImpl::recordDataPtrOnStream(
    const c10::DataPtr& pointer,
    const Stream& stream) const {
  if (pointer.get_deleter() == deleteBlock) {
    addStream(*static_cast<Block*>(pointer.get_context()), stream);
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const Device device(c10::kCUDA, currentDevice());
    if (size == 0) {
      return {nullptr, device};
    }
    const auto used = usedBytes += static_cast<int64_t>(size);
    if (used > Runtime::get().settings.memoryBytes) {
      usedBytes -= static_cast<int64_t>(size);
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "CUDA out of memory. Tried to allocate ",
          size,
          " bytes.");
    }
    return makeBlock(size, device, {Runtime::get().current(device.index())});
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "not in the fake");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    GuardImpl().recordDataPtrOnStream(pointer, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      DeviceIndex) override {
    return {};
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
};

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    return makeBlock(size, Device(c10::kCPU), {});
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "not in the fake");
  }
  bool record_event(void*, void* context, Stream stream) override {
    addStream(*static_cast<Block*>(context), stream);
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

} // namespace

bool isPinned(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == deleteBlock;
}

c10::Allocator* deviceAllocator() {
  static auto* const allocator = new Allocator();
  return allocator;
}

void registerAll() {
  static const bool once = [] {
    static const auto* const guard = new GuardImpl();
    c10::impl::DeviceGuardImplRegistrar(c10::kCUDA, guard);
    c10::SetAllocator(c10::kCUDA, deviceAllocator());
    at::setHostAllocator(c10::kCUDA, new HostAllocator());
    return true;
  }();
  (void)once;
}

} // namespace fake_cuda
