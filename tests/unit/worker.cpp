// A Worker whose peers send as fast as it receives, so that there is always
// more; and Deadlines, which need a Worker.

#include "transport/ucx/worker.h"
#include "sanitize/stress.h"
#include "transport/ucx/deadlines.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <thread>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;
using stress::require;

namespace {

std::atomic<bool> isFlooded{false};
// Calls of ucp_worker_progress() since a thread last handed something on.
std::atomic<int> calls{0};
constexpr int kFarTooMany = 1'000'000;

} // namespace

// Replaces UCX's for the core library.
extern "C" unsigned ucp_worker_progress(ucp_worker_h worker) {
  static const auto original = reinterpret_cast<unsigned (*)(ucp_worker_h)>(
      dlsym(RTLD_NEXT, "ucp_worker_progress"));
  const unsigned progressed = original(worker);
  if (!isFlooded.load()) {
    return progressed;
  }
  require(calls.fetch_add(1) < kFarTooMany, "a thread hands on what it has");
  return 1;
}

namespace {

struct Scene {
  base::Poller poller;
  std::shared_ptr<base::Gate> gate = std::make_shared<base::Gate>();
  std::shared_ptr<ControlWorker> worker =
      ControlWorker::create(UcpContext::create({}).value(), gate).value();
};

struct FloodedScene : Scene {
  FloodedScene() {
    isFlooded.store(true);
    calls.store(0);
  }
  ~FloodedScene() {
    isFlooded.store(false);
  }
};

void testAWaitEnds() {
  FloodedScene scene;
  int rounds = 0;
  scene.worker->progressUntil(
      [&](Locked&) {
        calls.store(0);
        return ++rounds == 3;
      },
      std::chrono::seconds(20));
  require(rounds == 3, "the wait ends when it is over");
  scene.worker->progressUntil(
      [&](Locked&) {
        calls.store(0);
        return false;
      },
      std::chrono::milliseconds(20)); // or else after its time
}

void testAWaitThatThrowsLeavesTheWorkerUnlocked() {
  Scene scene;
  try {
    scene.worker->progressUntil(
        [](Locked&) -> bool { throw std::bad_alloc(); },
        std::chrono::seconds(20));
    require(false, "what the condition throws is thrown");
  } catch (const std::bad_alloc&) {
  }
  bool entered = false;
  std::thread([&] {
    scene.worker->runLocked([&](Locked&) { entered = true; });
  }).join(); // waits for ever where the first thread has kept the lock
  require(entered, "another thread gets the lock");
}

void testOthersGetTheirTurn() {
  FloodedScene scene;
  std::atomic<bool> over{false};
  scene.worker->start(scene.poller, /*main=*/true);
  std::thread thread([&] {
    while (!over.load()) {
      scene.poller.wait();
      calls.store(0);
    }
  });
  for (int i = 0; i < 3; ++i) {
    std::atomic<bool> sent{false};
    std::atomic<bool> delivered{false};
    scene.worker->post([&](Locked& locked) {
      sent.store(true);
      locked.defer([&] { delivered.store(true); });
    });
    stress::become(
        [&] { return sent.load() && delivered.load(); },
        "what was posted and deferred runs");
  }
  isFlooded.store(false);
  over.store(true);
  scene.worker->progressSoon();
  thread.join();
  scene.worker->stop();
}

void testADeadlineAfterOneThatThrew() {
  Scene scene;
  int expired = 0;
  Deadlines<int> deadlines(
      scene.poller,
      *scene.worker,
      std::chrono::milliseconds(20),
      [&](Locked&, const std::shared_ptr<int>& object) {
        ++expired;
        if (*object == 1) {
          throw std::bad_alloc();
        }
      });
  const auto first = std::make_shared<int>(1);
  const auto second = std::make_shared<int>(2);
  for (const auto& object : {first, second}) {
    scene.worker->runLocked(
        [&](Locked& locked) { deadlines.add(locked, object); });
    // Far enough from the other one to have an alarm of its own.
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (expired != 2 && std::chrono::steady_clock::now() < end) {
    scene.poller.wait(/*timeoutMs=*/10);
  }
  require(expired == 2, "the second is noticed, too");
  deadlines.stop();
}

} // namespace

int main() {
  testAWaitEnds();
  testAWaitThatThrowsLeavesTheWorkerUnlocked();
  testOthersGetTheirTurn();
  testADeadlineAfterOneThatThrew();
  return 0;
}
