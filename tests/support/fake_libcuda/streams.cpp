#include "support/fake_libcuda/fake.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>

using std::chrono::microseconds;

namespace {

std::atomic<bool> held = false;
std::atomic<int> delay = 0; // of copies and kernels, us

// A thread that does the queued work in order.
class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}

  ~Stream() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void add(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopped_ || !queue_.empty(); });
      if (queue_.empty()) {
        return;
      }
      auto work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      while (held) {
        std::this_thread::sleep_for(microseconds(100));
      }
      work();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  bool stopped_ = false;
  std::thread thread_; // last: it uses the others
};

// How often an event was recorded, and how many of these records the streams
// have reached.
struct Progress {
  std::atomic<uint64_t> recorded;
  std::atomic<uint64_t> done;

  bool reached(uint64_t count) const {
    return done.load() >= count;
  }
};

struct Event {
  // Also the streams', which may reach a record after the event is destroyed.
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
};

std::mutex mutex;

Stream& defaultStream(int ordinal) {
  // Never destroyed: streams may be in use when the process ends.
  static auto* const all = new std::map<int, std::unique_ptr<Stream>>;
  std::lock_guard lock(mutex);
  auto& stream = (*all)[ordinal];
  if (stream == nullptr) {
    stream = std::make_unique<Stream>();
  }
  return *stream;
}

Stream& streamOf(CUstream stream) {
  return stream != nullptr ? *reinterpret_cast<Stream*>(stream)
                           : defaultStream(fake::ordinalOf(fake::current()));
}

Event* eventOf(CUevent event) {
  return reinterpret_cast<Event*>(event);
}

} // namespace

void fakeCudaHold(int isHeld) {
  held = isHeld != 0;
}

void fakeCudaDelay(int microseconds) {
  delay = microseconds;
}

void* fakeCudaStream() {
  return new Stream;
}

void fakeCudaEnqueue(void* stream, void (*run)(void*), void* argument) {
  static_cast<Stream*>(stream)->add([run, argument] { run(argument); });
}

void fakeCudaDrain(void* stream) {
  static_cast<Stream*>(stream)->wait();
}

CUresult fake::enqueueLate(CUstream stream, std::function<void()> work) {
  return enqueue(stream, [work = std::move(work)] {
    std::this_thread::sleep_for(microseconds(delay));
    work();
  });
}

CUresult fake::enqueue(CUstream stream, std::function<void()> work) {
  streamOf(stream).add(std::move(work));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned flags) {
  FAKE_ENTER(std::to_string(flags))
  *stream = reinterpret_cast<CUstream>(new Stream);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
  FAKE_ENTER("")
  delete reinterpret_cast<Stream*>(stream);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
  FAKE_ENTER(stream == nullptr ? "default" : "")
  streamOf(stream).wait();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned flags) {
  FAKE_ENTER(std::to_string(flags))
  *event = reinterpret_cast<CUevent>(new Event);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent event) {
  FAKE_ENTER("")
  delete eventOf(event);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  FAKE_ENTER("")
  const auto progress = eventOf(event)->progress;
  const uint64_t count = ++progress->recorded;
  return fake::enqueue(stream, [progress, count] {
    // If the event was recorded again meanwhile, on a faster stream, `done` is
    // already higher and stays so.
    uint64_t done = progress->done;
    while (done < count && !progress->done.compare_exchange_weak(done, count)) {
    }
  });
}

CUresult CUDAAPI cuEventQuery(CUevent event) {
  FAKE_ENTER("")
  const Progress& progress = *eventOf(event)->progress;
  return progress.reached(progress.recorded) ? CUDA_SUCCESS
                                             : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuMemcpyAsync(
    CUdeviceptr destination,
    CUdeviceptr source,
    size_t size,
    CUstream stream) {
  FAKE_ENTER(std::to_string(size))
  return fake::enqueueLate(stream, [=] {
    std::memcpy(
        reinterpret_cast<void*>(destination),
        reinterpret_cast<const void*>(source),
        size);
  });
}

CUresult CUDAAPI cuMemsetD8Async(
    CUdeviceptr address,
    unsigned char value,
    size_t count,
    CUstream stream) {
  FAKE_ENTER(std::to_string(count))
  return fake::enqueue(stream, [=] {
    std::memset(reinterpret_cast<void*>(address), value, count);
  });
}
