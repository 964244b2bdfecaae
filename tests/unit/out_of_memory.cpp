// An allocation fails where a frame is handed on to the Handler, and where a
// map is noted as used. Nobody waits for ever.

#include "sanitize/stress.h"
#include "transport/ucx/bulk/shared_maps.h"
#include "unit/side.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <new>
#include <string>
#include <thread>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport;
using stress::require;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

namespace {

constexpr size_t kFrame = 12'345;

// Of a thread: how many allocations are left, the last of which fails; 0: none
// fails.
thread_local int left = 0;
// What `left` becomes in another thread that copies a frame of kFrame bytes.
std::atomic<int> leftAfterFrame{0};
thread_local bool isMain = false;

} // namespace

// Not inlined: gcc would take memory of the one and free() for no pair.
[[gnu::noinline]] void* operator new(size_t size) {
  if (left > 0 && --left == 0) {
    throw std::bad_alloc();
  }
  if (size == kFrame && !isMain) {
    left = leftAfterFrame.exchange(0);
  }
  void* const memory = std::malloc(size != 0 ? size : 1);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

[[gnu::noinline]] void* operator new[](size_t size) {
  return operator new(size);
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}

[[gnu::noinline]] void operator delete[](void* memory) noexcept {
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void* memory, size_t /*size*/) noexcept {
  std::free(memory);
}

[[gnu::noinline]] void operator delete[](
    void* memory,
    size_t /*size*/) noexcept {
  std::free(memory);
}

namespace {

class Hears : public Welcoming {
 public:
  void onFrame(const ConnectionPtr&, std::unique_ptr<Incoming>) override {
    ++frames;
  }
  void onClosed(const ConnectionPtr&, const base::Error&) override {
    closed.set_value();
  }

  std::atomic<int> frames{0};
  std::promise<void> closed;
};

// The Handler hears of the end of a connection that has lost a frame.
void testAFrameIsLost() {
  for (int failing = 1; failing <= 4; ++failing) {
    Side<> opener;
    Side<Hears> accepter;
    const auto connection =
        opener.context->connect(accepter.context->address(), "hello");
    while (connection->peer() == PeerState::kConnecting) {
      std::this_thread::sleep_for(1ms);
    }
    const auto end = accepter.closed.get_future();
    leftAfterFrame = failing;
    connection->send(base::Buffer(kFrame), {}, [](const base::Error&) {});
    while (accepter.frames == 0 &&
           end.wait_for(1ms) != std::future_status::ready) {
      require(
          connection->peer() == PeerState::kOpen ||
              end.wait_for(60s) == std::future_status::ready,
          "the Handler hears of the end");
    }
  }
}

// A map that cannot be noted as used is not given back to a list that the same
// thread has locked.
void testAMapIsNotNoted() {
  const auto own = memory::SharedMap::create(1 << 20);
  ucx::BulkEntry entry;
  entry.size = own->size();
  entry.region = own->region().id;
  entry.fd = static_cast<uint64_t>(own->region().fd);
  bool succeeded = false;
  for (int failing = 1; !succeeded; ++failing) {
    ucx::bulk::SharedMaps maps;
    left = failing;
    try {
      succeeded = maps.map(getpid(), entry) != nullptr && left > 0;
    } catch (const std::bad_alloc&) {
    }
    left = 0;
    require(maps.trim(0s) == 0, "no map is left in use");
  }
}

} // namespace

int main() {
  isMain = true;
  alarm(100); // instead of waiting for ever
  testAMapIsNotNoted();
  testAFrameIsLost();
  return 0;
}
