#pragma once

// A fake CUDA for tests, in the host's memory: devices, streams that run their
// work late, and memory that is overwritten as soon as it may be reused.

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace fake_cuda {

// How often each kind of event has happened.
struct Counts {
  std::atomic<int64_t> synchronizations{0}; // a thread waited for a device
  std::atomic<int64_t> hostToDevice{0};
  std::atomic<int64_t> deviceToHost{0};
  std::atomic<int64_t> deviceToDevice{0};
  std::atomic<int64_t> pageable{0}; // copies to or from memory not pinned
  std::atomic<int64_t> foreachCopies{0};
};

struct Settings {
  std::atomic<int> devices{0};
  std::atomic<int64_t> delayMicroseconds{0}; // of each kernel and copy
  std::atomic<int64_t> memoryBytes{INT64_MAX}; // of all devices together
  std::atomic<bool> broken{false}; // every event reports an error
  std::atomic<int64_t> damaged{0}; // this many copies to devices change a byte
};

inline constexpr int kPoolStreams = 32;

// The driver of tests/support/fake_libcuda, if TORCH_RPC_EXT_LIBCUDA names it.
// Streams and device memory are then made by this driver, so that the driver's
// functions work with them, also in other processes.
struct Driver {
  void* (*stream)() = nullptr;
  void (*enqueue)(void*, void (*)(void*), void*) = nullptr;
  void (*drain)(void*) = nullptr;
  void* (*allocate)(int, size_t) = nullptr;
  void (*free)(int, void*) = nullptr;
  void (*delay)(int) = nullptr;

  // Null if there is no driver.
  static const Driver* get();
};

// A queue of work, and the thread that does the work in order.
class Queue {
 public:
  Queue();

  // `late` work begins after the delay.
  void push(std::function<void()> work, bool late);
  void drain();
  // Null without a driver.
  void* handle() const {
    return stream_;
  }

 private:
  void main();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false;
  void* const stream_; // the driver's stream, which replaces the thread
  std::thread thread_;
};

// Device memory, cut from segments as torch's allocator does.
class Segments {
 public:
  void* allocate(int device, size_t size);
  void free(void* memory);

 private:
  struct Segment {
    int device = 0;
    size_t size = 0;
    size_t used = 0; // bytes given out, from the beginning
    size_t blocks = 0; // blocks that are not free
  };

  std::mutex mutex_;
  std::map<char*, Segment> segments_;
  std::map<int, char*> open_; // device -> the segment that gives out blocks
};

// As a cudaEvent_t: the moment that was recorded last.
class Event {
 public:
  void record(Queue& queue);
  void block(Queue& queue);
  bool done() {
    std::lock_guard lock(state_->mutex);
    return state_->reached >= recorded_;
  }
  void wait() {
    waitFor(state_, recorded_);
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int64_t reached = 0;
  };
  static void waitFor(const std::shared_ptr<State>& state, int64_t moment);

  std::shared_ptr<State> state_ = std::make_shared<State>();
  int64_t recorded_ = 0;
};

// The one fake CUDA of the process; never destroyed.
class Runtime {
 public:
  static Runtime& get();

  Queue& queue(const c10::Stream& stream);
  c10::Stream current(c10::DeviceIndex device) const;
  c10::Stream fromPool(c10::DeviceIndex device);
  // Waits for a stream, or for all streams, and counts the wait.
  void synchronize(const c10::Stream& stream);
  void synchronizeAll();

  // Allocates memory. When it is released, its bytes are overwritten once the
  // work queued on `streams` until then is over.
  void* allocate(std::optional<c10::DeviceIndex> device, size_t size);
  struct Memory {
    void* address = nullptr;
    size_t size = 0;
    bool onDevice = false;
  };
  void release(Memory memory, std::vector<c10::Stream> streams);

  Counts counts;
  Settings settings;

 private:
  void poison(const Memory& memory);
  void free(const Memory& memory);

  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>>
      queues_;
  std::map<c10::DeviceIndex, int> nextFromPool_;
  // Memory that is freed later, so that a kernel that runs too late writes here
  // and not to other memory.
  std::deque<Memory> quarantine_;
  Segments segments_;
  size_t quarantined_ = 0;
};

// This thread's current device and streams.
c10::DeviceIndex& currentDevice();
std::map<c10::DeviceIndex, c10::StreamId>& currentStreams();

} // namespace fake_cuda
