// base::Gate: threads enter and leave while others close the gate and wait
// until all have left. Some of those wait while they are inside.

#include "base/gate.h"
#include "sanitize/stress.h"

#include <memory>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;
using base::Gate;

namespace {

// What threads inside use. It is destroyed as soon as all have left.
struct Guarded {
  Gate gate;
  std::unique_ptr<uint64_t> value = std::make_unique<uint64_t>(0);
  std::mutex mutex;
};

void use(Guarded& guarded) {
  const std::lock_guard lock(guarded.mutex);
  ++*guarded.value;
}

// Makes a gate, uses it and closes it. Returns how often it was passed.
uint64_t live(unsigned seed) {
  Guarded guarded;
  std::atomic<bool> deserted{false};
  std::atomic<uint64_t> passed{0};
  Crowd crowd;
  crowd.add(3, [&](auto&) {
    const Gate::Inside inside(guarded.gate);
    if (!inside.counted()) {
      std::this_thread::yield();
      return;
    }
    require(!deserted.load(), "nobody is inside of a deserted gate");
    {
      const Gate::Inside again(guarded.gate);
      if (again.counted()) {
        use(guarded);
      }
    }
    require(guarded.gate.holdsThisThread(), "it is inside");
    passed.fetch_add(1);
  });
  std::thread other([&] {
    if (seed % 2 == 0) {
      const Gate::Inside inside(guarded.gate);
      guarded.gate.wait(); // for all threads but this one
      if (inside.counted()) {
        use(guarded);
      }
    } else {
      guarded.gate.wait();
    }
  });
  std::this_thread::sleep_for(std::chrono::microseconds(seed % 1000));
  require(!guarded.gate.holdsThisThread(), "it is outside");
  guarded.gate.close();
  guarded.gate.wait(); // also for the thread that waits inside
  deserted.store(true);
  guarded.value.reset(); // without the mutex: nobody may be using it
  other.join();
  crowd.run(0);
  return passed.load();
}

} // namespace

int main(int count, char** arguments) {
  const auto end = std::chrono::steady_clock::now() +
      std::chrono::duration<double>(seconds(count, arguments));
  uint64_t passed = 0;
  unsigned seed = 0;
  do {
    passed += live(++seed);
  } while (std::chrono::steady_clock::now() < end);
  require(passed > 0, "the gate was open");
  return 0;
}
