// A Worker whose peers send as fast as it receives: there is always more.

#include "transport/ucx/worker.h"
#include "sanitize/stress.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <memory>
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

  Scene() {
    isFlooded.store(true);
    calls.store(0);
  }
  ~Scene() {
    isFlooded.store(false);
  }
};

void testAWaitEnds() {
  Scene scene;
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

void testOthersGetTheirTurn() {
  Scene scene;
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

} // namespace

int main() {
  testAWaitEnds();
  testOthersGetTheirTurn();
  return 0;
}
