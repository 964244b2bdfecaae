// AbandonedSlots: a queue of this process that its owner has unmapped, such as
// another user of UCX. What lies at its place now must not be written to.

#include "transport/ucx/abandoned_slots.h"
#include "sanitize/stress.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>

using namespace torch_rpc_ext;
using stress::require;

namespace {

constexpr size_t kBytes = 9 * 4096;

// What abandoned_slots.cpp takes for a queue of UCX, whose first slot is taken.
std::string queueWithATakenSlot() {
  std::string bytes(kBytes, '\0');
  const auto put = [&](size_t at, auto value) {
    std::memcpy(bytes.data() + at, &value, sizeof(value));
  };
  put(0, uint64_t{1}); // head
  put(8, uint32_t{10}); // length of the address by which it is woken
  put(12, sa_family_t{AF_UNIX});
  put(136, int32_t{getpid()});
  put(192, uint8_t{1}); // the slot is not full in the first lap
  return bytes;
}

class Now final : public base::TaskRunner {
  void submit(base::TaskPtr task) override {
    task->run();
  }
};

void lookFor(base::Poller& poller, std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
    poller.wait(/*timeoutMs=*/10);
  }
}

void testAQueueThatIsUnmapped() {
  const std::string name = "/ucx_shm_posix_test_" + std::to_string(getpid());
  const std::string queue = queueWithATakenSlot();
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  require(file >= 0 && ftruncate(file, kBytes) == 0, "shared memory");
  const auto map = [&](void* at, int flags, int fd) {
    void* const memory = mmap(at, kBytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    require(memory != MAP_FAILED, "mmap");
    std::memcpy(memory, queue.data(), kBytes);
    return memory;
  };
  void* const place = map(nullptr, MAP_SHARED, file);
  shm_unlink(name.c_str());

  base::Poller poller;
  Now runner;
  transport::ucx::AbandonedSlots slots(poller, runner, [] {});
  slots.lookSoon();
  lookFor(poller, std::chrono::milliseconds(150));
  map(place, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1);
  lookFor(poller, std::chrono::seconds(1));
  require(std::memcmp(place, queue.data(), kBytes) == 0, "nothing is written");

  map(place, MAP_SHARED | MAP_FIXED, file);
  slots.workerAdded();
  const auto isFreed = [&] {
    return std::memcmp(place, queue.data(), kBytes) != 0;
  };
  for (int i = 0; i < 200 && !isFreed(); ++i) {
    lookFor(poller, std::chrono::milliseconds(100));
  }
  require(isFreed(), "the slot of a queue is freed");
  slots.stop();
}

} // namespace

int main() {
  testAQueueThatIsUnmapped();
  return 0;
}
