#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

namespace fake_cuda {

namespace {

constexpr size_t kQuarantineBytes = size_t{256} << 20;
constexpr int kPoison = 0xab;

} // namespace

void Queue::main() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !work_.empty(); });
    auto [work, late] = std::move(work_.front());
    work_.pop_front();
    busy_ = true;
    lock.unlock();
    const auto delay = Runtime::get().settings.delayMicroseconds.load();
    if (late && delay > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    work();
    work = nullptr;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void Queue::drain() {
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

void* Runtime::allocate(size_t size) {
  void* const memory = std::aligned_alloc(512, (size + 511) / 512 * 512);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void Runtime::release(
    void* memory,
    size_t size,
    std::vector<c10::Stream> streams) {
  if (streams.empty()) {
    poison(memory, size);
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
  own.push([this, memory, size] { poison(memory, size); }, /*late=*/false);
}

void Runtime::poison(void* memory, size_t size) {
  std::memset(memory, kPoison, size);
  std::lock_guard lock(mutex_);
  quarantine_.emplace_back(memory, size);
  quarantined_ += size;
  while (quarantined_ > kQuarantineBytes) {
    quarantined_ -= quarantine_.front().second;
    std::free(quarantine_.front().first);
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
