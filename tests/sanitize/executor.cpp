// agent::Executor: tasks of all kinds, nested calls, leaders, and stop().

#include "agent/executor.h"
#include "sanitize/stress.h"

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;
using agent::Executor;

namespace {

class Counter {
 public:
  base::TaskPtr task(std::function<void()> body = nullptr) {
    submitted_.fetch_add(1);
    return base::makeTask([this, body] {
      if (body) {
        body();
      }
      ran_.fetch_add(1);
    });
  }
  uint64_t left() const {
    return submitted_.load() - ran_.load();
  }

 private:
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> ran_{0};
};

// A request that waits for a task of the same pool, as a nested call does.
void nest(Executor& executor, Counter& counter) {
  const auto scope = executor.currentRequest();
  require(scope != nullptr, "a request knows itself");
  const auto answered = std::make_shared<std::atomic<bool>>(false);
  executor.beginNested(scope);
  executor.submitCompletion(counter.task([&executor, scope, answered] {
    executor.endNested(scope);
    answered->store(true);
  }));
  while (!answered->load()) {
    std::this_thread::yield();
  }
}

// A thread that is not in the pool waits for an answer, and serves the main
// descriptor meanwhile.
void lead(Executor& executor, Counter& counter) {
  const auto answered = std::make_shared<std::atomic<bool>>(false);
  Executor::Leader leader(executor);
  const auto signal = leader.signal();
  executor.submitRequest(counter.task([answered, signal] {
    answered->store(true);
    signal->raise();
  }));
  if (leader.leads()) {
    leader.wait([&] { return answered->load(); });
  }
  while (!answered->load()) {
    std::this_thread::yield();
  }
}

} // namespace

int main(int count, char** arguments) {
  for (const size_t threads : {1, 4}) {
    Counter counter;
    Executor executor(threads);
    executor.start();
    Crowd crowd;
    const auto hasRoom = [&counter] { return counter.left() < 1000; };
    crowd.add(1, [&](auto&) {
      if (hasRoom()) {
        executor.submit(counter.task());
        executor.submitCompletion(counter.task());
        executor.submitRequest(counter.task());
      }
    });
    crowd.add(1, [&](auto&) {
      if (hasRoom()) {
        executor.submitRequest(counter.task([&] { nest(executor, counter); }));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
    crowd.add(2, [&](auto&) { lead(executor, counter); });
    crowd.add(1, [&](auto&) {
      require(executor.threads() > 0, "somebody stays");
      (void)executor.runningRequests();
      (void)executor.queuedRequests();
    });
    const uint64_t acts = crowd.run(seconds(count, arguments) / 2);
    require(acts > 100, "something was done");
    for (int i = 0; i < 5000 && counter.left() != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    require(counter.left() == 0, "every task runs");
    require(executor.runningRequests() == 0, "no slot is lost");
    require(executor.stop(10000), "it ends");
  }
  return 0;
}
