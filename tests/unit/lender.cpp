// The Lender alone: messages that wait for memory, with a runner and a poller
// of the test's own.

#include "agent/lender.h"
#include "sanitize/stress.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

using namespace torch_rpc_ext;
using agent::Encoded;
using stress::require;

namespace {

constexpr size_t kSize = size_t{3} << 20;
// Two blocks fit, and no third one.
constexpr size_t kCache = size_t{8} << 20;

// Keeps its tasks until they are run.
struct Runner final : base::TaskRunner {
  void submit(base::TaskPtr task) override {
    tasks.push_back(std::move(task));
  }
  size_t runAll() {
    size_t count = 0;
    while (!tasks.empty()) {
      for (auto& task : std::exchange(tasks, {})) {
        task->run();
        ++count;
      }
      require(count < 100, "the tasks come to an end");
    }
    return count;
  }
  std::vector<base::TaskPtr> tasks;
};

struct Fixture {
  base::Poller poller;
  Runner runner;
  std::shared_ptr<memory::BufferCache> cache =
      std::make_shared<memory::BufferCache>(kCache);
  std::shared_ptr<agent::Lender> lender =
      agent::Lender::create(cache, runner, poller);
  std::vector<char> bytes = std::vector<char>(kSize, 'x');

  ~Fixture() {
    lender->stop();
  }

  // Sends a message with so many tensors of kSize. The result has a value when
  // the message has been sent.
  std::shared_ptr<std::optional<Encoded>> send(size_t tensors = 1) {
    Encoded encoded;
    encoded.mappable = true;
    for (size_t i = 0; i < tensors; ++i) {
      encoded.bulk.push_back({{bytes.data(), bytes.size()}});
    }
    auto sent = std::make_shared<std::optional<Encoded>>();
    lender->lend(std::move(encoded), [sent](Encoded ready) {
      sent->emplace(std::move(ready));
    });
    return sent;
  }
  void waitForTimer() {
    poller.wait(/*timeoutMs=*/10'000);
  }
};

bool isLent(const std::shared_ptr<std::optional<Encoded>>& sent) {
  return *sent && (*sent)->bulk[0].map != nullptr &&
      static_cast<const char*>((*sent)->bulk[0].data)[kSize - 1] == 'x';
}
bool isSentAsItIs(const std::shared_ptr<std::optional<Encoded>>& sent) {
  return *sent && (*sent)->bulk[0].map == nullptr;
}

void aMessageWaitsUntilABlockComesBack() {
  Fixture f;
  const auto first = f.send();
  const auto second = f.send();
  require(isLent(first) && isLent(second), "two blocks are lent at once");
  const auto third = f.send();
  const auto fourth = f.send();
  require(!*third && !*fourth, "there is no third block");
  require(
      f.lender->waiting().messages == 2 &&
          f.lender->waiting().bytes == 2 * kSize,
      "two messages wait");
  first->reset(); // the receiver has let go of the memory
  require(!*third, "nothing happens where a block is given back");
  f.runner.runAll();
  require(isLent(third) && !*fourth, "in the order of sending");
  third->reset();
  f.runner.runAll();
  require(isLent(fourth), "one after another");
  require(f.lender->waiting().messages == 0, "nobody waits any more");
}

void nobodyWaitsForAReceiverThatKeepsAll() {
  Fixture f;
  const auto first = f.send();
  const auto second = f.send();
  const auto third = f.send();
  const auto fourth = f.send();
  f.waitForTimer();
  require(isSentAsItIs(third) && isSentAsItIs(fourth), "all that waited");
  require(isSentAsItIs(f.send()), "further messages do not wait");
  first->reset();
  const auto fifth = f.send();
  require(isLent(fifth), "there was an idle block");
  require(!*f.send(), "blocks come back, so messages wait again");
}

void aReceiverThatReturnsWhatItIsSent() {
  Fixture f;
  const auto first = f.send();
  const auto second = f.send();
  const auto third = f.send();
  const auto fourth = f.send();
  f.cache->gotBack(*(*first)->bulk[0].map);
  f.runner.runAll();
  require(isSentAsItIs(third), "its block is a result now, and not idle");
  require(!*fourth, "one block, one message");
  first->reset(); // the result dies
  f.runner.runAll();
  require(isLent(fourth), "an idle block");
}

void aMessageThatNeedsMoreThanThereIs() {
  Fixture f;
  const auto first = f.send();
  const auto two = f.send(/*tensors=*/2);
  require(!*two, "one block is left");
  require(f.runner.runAll() == 0, "it does not wake itself");
  require(!*two, "it waits");
  first->reset();
  f.runner.runAll();
  require(isLent(two), "all of its blocks at once");
}

void whatWaitsIsDroppedAtTheEnd() {
  Fixture f;
  const auto first = f.send();
  const auto second = f.send();
  const auto third = f.send();
  require(third.use_count() == 2, "the lender holds the message");
  f.lender->stop();
  require(third.use_count() == 1 && !*third, "without being sent");
  first->reset();
  require(f.runner.tasks.empty(), "nothing is submitted after stop()");
  const auto fourth = f.send();
  require(isLent(fourth), "while threads end, they still send");
  require(isSentAsItIs(f.send()), "but nobody waits");
}

void aBlockMayOutliveTheLender() {
  std::optional<Encoded> sent;
  {
    Fixture f;
    sent = std::move(*f.send());
    require(sent.has_value(), "lent");
  }
  sent.reset();
}

} // namespace

int main() {
  aMessageWaitsUntilABlockComesBack();
  nobodyWaitsForAReceiverThatKeepsAll();
  aReceiverThatReturnsWhatItIsSent();
  aMessageThatNeedsMoreThanThereIs();
  whatWaitsIsDroppedAtTheEnd();
  aBlockMayOutliveTheLender();
  return 0;
}
