// Executor::stop() runs the completions that are queued, also while as many
// threads are busy as there are cores: they may wait for what is queued.

#include "agent/executor.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <latch>
#include <memory>
#include <thread>

using namespace torch_rpc_ext;

namespace {

// Whether the threads end. `false` after ten seconds.
bool ends() {
  const auto busy = std::max(2u, std::thread::hardware_concurrency());
  // Kept for ever when the threads do not end.
  auto* const executor = new agent::Executor(busy);
  const auto started = std::make_shared<std::latch>(busy);
  const auto released = std::make_shared<std::latch>(1);
  executor->start();
  for (unsigned i = 0; i < busy; ++i) {
    executor->submitCompletion(base::makeTask([started, released] {
      started->count_down();
      released->wait();
    }));
  }
  started->wait();
  executor->submitCompletion(
      base::makeTask([released] { released->count_down(); }));
  return executor->stop(/*milliseconds=*/10'000);
}

} // namespace

int main() {
  // The thread that attends to the queue takes the task after a millisecond
  // anyway: stop() is quicker than that in most rounds.
  for (int round = 0; round < 20; ++round) {
    if (!ends()) {
      std::fprintf(stderr, "round %d: the threads do not end\n", round);
      std::_Exit(1);
    }
  }
  return 0;
}
