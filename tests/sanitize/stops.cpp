// transport::ucx: two contexts in one process, each on an executor of its own,
// send to each other and stop amid traffic. No Handler method may run once
// stop() has returned, and each callback must fire exactly once.

#include "agent/executor.h"
#include "sanitize/stress.h"
#include "transport/ucx/context.h"

#include <cstring>
#include <memory>
#include <string>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;
using agent::Executor;
using transport::ucx::UcxContext;

// UCX itself is not compiled for the sanitizers.
extern "C" const char* __tsan_default_options() {
  return "ignore_noninstrumented_modules=1";
}
extern "C" const char* __asan_default_options() {
  return "detect_leaks=0";
}

namespace {

constexpr size_t kBulkBytes = 100'000; // more than is sent inline
constexpr size_t kBigHead = 200'000; // more than UCX takes eagerly

void pause() {
  thread_local std::minstd_rand random(
      std::hash<std::thread::id>()(std::this_thread::get_id()));
  if (random() % 4 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
  }
}

// One context with its executor and Handler.
class Side final : public transport::Handler {
 public:
  explicit Side(const transport::ucx::Options& options) {
    auto made = UcxContext::create(options);
    require(made.ok(), "a context");
    context = made.value();
    context->setSecret("secret");
    executor.start();
    context->start(executor.poller(), executor, *this);
  }
  ~Side() override {
    require(executor.stop(10000), "the executor ends");
  }

  void stop() {
    context->stop();
    stopped.store(true);
    require(inside.load() == 0, "nobody is inside of the Handler");
  }

  // Made at the beginning of each Handler method.
  class Method {
   public:
    explicit Method(Side& side) : side_(side) {
      side_.inside.fetch_add(1);
      require(!side_.stopped.load(), "no Handler method after stop()");
      pause();
      side_.visits += 1;
    }
    ~Method() {
      require(!side_.stopped.load(), "stop() waits for Handler methods");
      side_.inside.fetch_sub(1);
    }

   private:
    Side& side_;
  };

  std::string introduction() override {
    const Method method(*this);
    return "side";
  }
  base::Error onAccept(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    const Method method(*this);
    open.fetch_add(1);
    return {};
  }
  base::Error onConnected(
      const transport::ConnectionPtr& /*connection*/,
      const std::string& /*hello*/) override {
    const Method method(*this);
    open.fetch_add(1);
    return {};
  }
  void onFrame(
      const transport::ConnectionPtr& connection,
      std::unique_ptr<transport::Incoming> incoming) override {
    const Method method(*this);
    frames.fetch_add(1);
    if (incoming->bulkSizes().empty()) {
      if (stopsInFrame.exchange(false)) {
        stoppedInside.store(true);
        context->stop();
      }
      return;
    }
    if (incoming->head().size % 4 == 0) {
      return; // refuses the bulk
    }
    auto bytes = std::make_shared<std::vector<char>>(kBulkBytes);
    incoming->receive(
        {{bytes->data(), bytes->size()}},
        [this, bytes, connection](const base::Error& error) {
          if (!error) {
            require(
                (*bytes)[0] == 'b' && bytes->back() == 'b',
                "the bulk is whole");
            received.fetch_add(1);
          }
        },
        nullptr);
  }
  void onClosed(
      const transport::ConnectionPtr& /*connection*/,
      const base::Error& error) override {
    const Method method(*this);
    require(static_cast<bool>(error), "an end has a reason");
    closed.fetch_add(1);
  }

  Executor executor{2};
  std::shared_ptr<UcxContext> context;
  std::atomic<bool> stopped{false};
  std::atomic<bool> stopsInFrame{false};
  std::atomic<bool> stoppedInside{false};
  std::atomic<int> inside{0};
  std::atomic<uint64_t> visits{0};
  std::atomic<uint64_t> open{0};
  std::atomic<uint64_t> closed{0};
  std::atomic<uint64_t> frames{0};
  std::atomic<uint64_t> received{0};
};

struct Sent {
  std::atomic<uint64_t> frames{0};
  std::atomic<uint64_t> answered{0};
};

void send(
    const transport::ConnectionPtr& connection,
    const std::string& bulk,
    Sent& sent,
    size_t number) {
  base::Buffer head(number % 16 == 0 ? kBigHead : 1 + number % 8);
  std::memset(head.data(), 'h', head.size());
  std::vector<transport::BulkSpan> spans;
  if (number % 2 == 0) {
    spans.push_back({{bulk.data(), bulk.size()}});
  }
  sent.frames.fetch_add(1);
  const auto fired = std::make_shared<std::atomic<bool>>(false);
  connection->send(std::move(head), std::move(spans), [&sent, fired](auto&) {
    require(!fired->exchange(true), "a callback fires once");
    sent.answered.fetch_add(1);
  });
}

struct Totals {
  uint64_t lives = 0;
  uint64_t frames = 0;
  uint64_t received = 0;
  uint64_t slowest = 0; // milliseconds
};

// Makes two contexts, uses them and stops them.
void live(std::minstd_rand& random, Sent& sent, Totals& totals) {
  const std::string bulk(kBulkBytes, 'b');
  transport::ucx::Options options;
  options.useCma = random() % 2 == 0;
  if (random() % 4 == 0) {
    options.encryption = transport::ucx::Encryption::kOn;
  }
  Side left(options);
  Side right(options);
  const std::string addresses[] = {
      right.context->address(), left.context->address()};
  UcxContext* const contexts[] = {left.context.get(), right.context.get()};
  const unsigned way = random() % 4;
  std::atomic<bool> ends{false};
  {
    Crowd crowd;
    for (int i = 0; i < 2; ++i) {
      crowd.add(1, [&, i](auto& choice) {
        if (ends.load() && choice() % 16 != 0) {
          // Does not connect: stop() waits long for a connection to a context
          // that has stopped.
          pause();
          return;
        }
        const auto connection = contexts[i]->connect(addresses[i], "hello");
        const int count = 1 + static_cast<int>(choice() % 40);
        for (int j = 0; j < count && !connection->closed(); ++j) {
          // At the end without bulk: stop() waits a while for memory that is
          // lent.
          send(connection, bulk, sent, ends.load() ? 1 : choice());
          pause();
        }
        // A connection that is closed while it opens loses its frames. So
        // mostly wait until it is open, but not always.
        const bool waits = choice() % 8 != 0;
        while (waits && !ends.load() &&
               connection->peer() == transport::PeerState::kConnecting) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        connection->close();
        pause();
      });
    }
    // Stop mostly amid traffic, and now and then while the contexts connect.
    const uint64_t least = random() % 8 == 0 ? 0 : 1 + random() % 20;
    for (int i = 0; i < 2000 && (left.frames < least || right.frames < least);
         ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2'000));
    ends.store(true);
    const auto begin = std::chrono::steady_clock::now();
    switch (way) {
      case 0: // one after the other
        left.stop();
        right.stop();
        break;
      case 1: { // both at the same time
        std::thread other([&] { left.stop(); });
        right.stop();
        other.join();
        break;
      }
      case 2: { // one of them twice at the same time
        std::thread other([&] { left.stop(); });
        left.stop();
        other.join();
        right.stop();
        break;
      }
      case 3: // from inside of the Handler, if a frame comes
        left.stopsInFrame.store(true);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        left.stop();
        right.stop();
        break;
    }
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - begin);
    totals.slowest =
        std::max(totals.slowest, static_cast<uint64_t>(took.count()));
  }
  for (const Side* side : {&left, &right}) {
    if (!side->stoppedInside.load()) {
      require(side->closed.load() >= side->open.load(), "each end is told");
    }
    totals.frames += side->frames.load();
    totals.received += side->received.load();
  }
  for (int i = 0; i < 5000 && sent.answered != sent.frames; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  require(sent.answered == sent.frames, "each callback fires");
  ++totals.lives;
}

} // namespace

// Arguments: the seconds to run; optionally any word, to print figures to
// stdout.
int main(int count, char** arguments) {
  std::minstd_rand random(1);
  Sent sent;
  Totals totals;
  const auto end = std::chrono::steady_clock::now() +
      std::chrono::duration<double>(seconds(count, arguments));
  do {
    live(random, sent, totals);
  } while (std::chrono::steady_clock::now() < end);
  require(totals.frames > 0 && totals.received > 0, "frames and bulk arrive");
  if (count > 2) {
    std::printf(
        "%lu lives, %lu frames, %lu bulks, the slowest stop %lu ms\n",
        totals.lives,
        totals.frames,
        totals.received,
        totals.slowest);
  }
  return 0;
}
