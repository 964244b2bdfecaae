#include "runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>

namespace fake_cuda {

namespace {

constexpr size_t kQuarantineBytes = size_t{256} << 20;
constexpr int kPoison = 0xab;
constexpr size_t kSegmentBytes = size_t{2} << 20;

} // namespace

const Driver* Driver::get() {
  static const Driver* const driver = [] {
    const char* const path = std::getenv("TORCH_RPC_EXT_LIBCUDA");
    void* const library = path != nullptr ? dlopen(path, RTLD_NOW) : nullptr;
    Driver* found = nullptr;
    const auto find = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(
          dlsym(library, name));
    };
    if (library != nullptr) {
      found = new Driver();
      find(found->stream, "fakeCudaStream");
      find(found->enqueue, "fakeCudaEnqueue");
      find(found->drain, "fakeCudaDrain");
      find(found->allocate, "fakeCudaAllocate");
      find(found->free, "fakeCudaFree");
      find(found->delay, "fakeCudaDelay");
    }
    return found;
  }();
  return driver;
}

Queue::Queue()
    : stream_(Driver::get() != nullptr ? Driver::get()->stream() : nullptr) {
  if (stream_ == nullptr) {
    thread_ = std::thread([this] { main(); });
  }
}

void Queue::push(std::function<void()> work, bool late) {
  using Work = std::function<void()>;
  auto run = [work = std::move(work), late] {
    const auto delay = Runtime::get().settings.delayMicroseconds.load();
    if (late && delay > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    work();
  };
  if (stream_ != nullptr) {
    Driver::get()->enqueue(
        stream_,
        [](void* queued) {
          const std::unique_ptr<Work> owned(static_cast<Work*>(queued));
          (*owned)();
        },
        new Work(std::move(run)));
    return;
  }
  std::lock_guard lock(mutex_);
  work_.emplace_back(std::move(run));
  changed_.notify_all();
}

void Queue::main() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !work_.empty(); });
    auto work = std::move(work_.front());
    work_.pop_front();
    busy_ = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void Queue::drain() {
  if (stream_ != nullptr) {
    Driver::get()->drain(stream_);
    return;
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return work_.empty() && !busy_; });
}

void Event::record(Queue& queue) {
  queue.push(
      [state = state_, moment = ++recorded_] {
        std::lock_guard lock(state->mutex);
        state->reached = std::max(state->reached, moment);
        state->changed.notify_all();
      },
      /*late=*/false);
}

void Event::block(Queue& queue) {
  queue.push(
      [state = state_, moment = recorded_] { waitFor(state, moment); },
      /*late=*/false);
}

void Event::waitFor(const std::shared_ptr<State>& state, int64_t moment) {
  std::unique_lock lock(state->mutex);
  state->changed.wait(lock, [&] { return state->reached >= moment; });
}

Runtime& Runtime::get() {
  static auto* const runtime = new Runtime();
  return *runtime;
}

Queue& Runtime::queue(const c10::Stream& stream) {
  std::lock_guard lock(mutex_);
  auto& queue = queues_[{stream.device_index(), stream.id()}];
  if (queue == nullptr) {
    queue = std::make_unique<Queue>();
  }
  return *queue;
}

c10::Stream Runtime::current(c10::DeviceIndex device) const {
  const auto& streams = currentStreams();
  const auto found = streams.find(device);
  return c10::Stream(
      c10::Stream::UNSAFE,
      c10::Device(c10::kCUDA, device),
      found == streams.end() ? 0 : found->second);
}

c10::Stream Runtime::fromPool(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  const int next = nextFromPool_[device]++;
  return c10::Stream(
      c10::Stream::UNSAFE,
      c10::Device(c10::kCUDA, device),
      1 + next % kPoolStreams);
}

void Runtime::synchronize(const c10::Stream& stream) {
  ++counts.synchronizations;
  queue(stream).drain();
}

void Runtime::synchronizeAll() {
  ++counts.synchronizations;
  std::vector<Queue*> queues;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, queue] : queues_) {
      queues.push_back(queue.get());
    }
  }
  for (Queue* queue : queues) {
    queue->drain();
  }
}

void* Segments::allocate(int device, size_t size) {
  const size_t wanted = (size + 511) / 512 * 512;
  std::lock_guard lock(mutex_);
  if (const auto open = open_.find(device); open != open_.end()) {
    Segment& segment = segments_[open->second];
    if (segment.used + wanted <= segment.size) {
      ++segment.blocks;
      return open->second + std::exchange(segment.used, segment.used + wanted);
    }
  }
  const size_t whole = std::max(wanted, kSegmentBytes);
  auto* const made = static_cast<char*>(Driver::get()->allocate(device, whole));
  if (made == nullptr) {
    throw std::bad_alloc();
  }
  segments_[made] = {device, whole, wanted, 1};
  open_[device] = made;
  return made;
}

void Segments::free(void* memory) {
  std::lock_guard lock(mutex_);
  const auto found =
      std::prev(segments_.upper_bound(static_cast<char*>(memory)));
  auto& [begin, segment] = *found;
  if (--segment.blocks == 0 && open_[segment.device] != begin) {
    Driver::get()->free(segment.device, begin);
    segments_.erase(found);
  }
}

void* Runtime::allocate(std::optional<c10::DeviceIndex> device, size_t size) {
  if (device && Driver::get() != nullptr) {
    return segments_.allocate(*device, size);
  }
  void* const memory = std::aligned_alloc(512, (size + 511) / 512 * 512);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void Runtime::release(Memory memory, std::vector<c10::Stream> streams) {
  if (streams.empty()) {
    poison(memory);
    return;
  }
  const c10::Stream first = streams.front();
  streams.erase(streams.begin());
  Queue& own = queue(first);
  for (const c10::Stream& stream : streams) {
    Event event;
    event.record(queue(stream));
    event.block(own);
  }
  own.push([this, memory] { poison(memory); }, /*late=*/false);
}

void Runtime::free(const Memory& memory) {
  if (memory.onDevice && Driver::get() != nullptr) {
    segments_.free(memory.address);
  } else {
    std::free(memory.address);
  }
}

void Runtime::poison(const Memory& memory) {
  std::memset(memory.address, kPoison, memory.size);
  std::lock_guard lock(mutex_);
  quarantine_.push_back(memory);
  quarantined_ += memory.size;
  while (quarantined_ > kQuarantineBytes) {
    quarantined_ -= quarantine_.front().size;
    free(quarantine_.front());
    quarantine_.pop_front();
  }
}

c10::DeviceIndex& currentDevice() {
  thread_local c10::DeviceIndex device = 0;
  return device;
}

std::map<c10::DeviceIndex, c10::StreamId>& currentStreams() {
  thread_local std::map<c10::DeviceIndex, c10::StreamId> streams;
  return streams;
}

} // namespace fake_cuda
