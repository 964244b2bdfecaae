// agent::device::FillLevel: one thread fills, others wait for bytes.

#include "agent/device/fill_level.h"
#include "sanitize/stress.h"

#include <atomic>
#include <memory>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;

namespace {

constexpr uint64_t kEnd = 64;

// Writes bytes before it reports them, as a device does.
class Writer final : public agent::device::FillLevel {
 public:
  void write(uint64_t bytes) {
    written_.store(bytes);
    reached(bytes);
  }
  void fail() {
    failed({base::ErrorKind::kSystem, "broken"});
  }
  uint64_t written() const {
    return written_.load();
  }

 private:
  std::atomic<uint64_t> written_{0};
};

// Fills up to `end`, and reports an error there if more bytes were to come.
// Each wait must end exactly once, not too early, and with an error only if its
// bytes never come.
void fill(uint64_t end, Crowd::Source& random) {
  const auto writer = std::make_shared<Writer>();
  std::atomic<int> answers{0};
  const auto wait = [&](uint64_t bytes) {
    writer->whenFilled(bytes, [&, bytes](const base::Error& error) {
      require(
          error ? bytes > end : writer->written() >= bytes,
          "what is told is so");
      answers.fetch_add(1);
    });
  };
  std::vector<std::thread> waiters;
  for (unsigned i = 0; i < 3; ++i) {
    waiters.emplace_back([&, first = random()] {
      for (uint64_t k = 0; k < kEnd; ++k) {
        wait(1 + (first + k * 7) % kEnd);
      }
    });
  }
  for (uint64_t level = 1; level <= end; ++level) {
    writer->write(level);
  }
  if (end < kEnd) {
    writer->fail();
  }
  for (auto& waiter : waiters) {
    waiter.join();
  }
  require(answers.load() == 3 * kEnd, "each wait ends once");
}

} // namespace

int main(int count, char** arguments) {
  Crowd crowd;
  crowd.add(2, [](Crowd::Source& random) {
    fill(random() % 2 == 0 ? kEnd : random() % kEnd, random);
  });
  require(crowd.run(seconds(count, arguments)) > 0, "something was done");
}
