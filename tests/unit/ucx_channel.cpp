// UcxChannel: chunks that come before they are expected, which only a sender
// that breaks the protocol makes; chunks that nobody wants any more; and one
// that comes when the channel stops.

#include "transport/ucx/bulk/ucx_channel.h"
#include "sanitize/stress.h"
#include "unit/answer.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport;
using namespace torch_rpc_ext::transport::ucx;
using stress::require;
using unit::Answer;

namespace {

constexpr uint64_t kTag = uint64_t{1} << 40;
constexpr size_t kSize = 1000; // so few bytes UCX sends unasked

class Side {
 public:
  Side(
      const std::shared_ptr<UcpContext>& ucp,
      const std::shared_ptr<base::Gate>& gate,
      base::Poller& poller)
      : worker(BulkWorker::create(ucp, gate).value()),
        channel(std::make_shared<bulk::UcxChannel>(worker, poller)),
        address(channel->addressFor({}).value()) {}
  ~Side() {
    stop();
  }

  void stop() {
    if (!std::exchange(stopped, true)) {
      channel->stop();
    }
  }

  bool hasUnexpected(uint64_t tag) {
    bool has = false;
    worker->runLocked([&](BulkLocked& locked) {
      ucp_tag_recv_info_t info;
      has = ucp_tag_probe_nb(locked.get(), tag, ~uint64_t{0}, 0, &info) !=
          nullptr;
    });
    return has;
  }

  const std::shared_ptr<BulkWorker> worker;
  const std::shared_ptr<bulk::UcxChannel> channel;
  const std::string address;
  bool stopped = false;
};

struct Scene {
  base::Poller poller;
  std::shared_ptr<base::Gate> gate = std::make_shared<base::Gate>();
  std::shared_ptr<UcpContext> ucp = UcpContext::create({}).value();
  Side from{ucp, gate, poller};
  Side to{ucp, gate, poller};

  template <typename Done>
  void progressUntil(Done&& done, std::chrono::milliseconds most) {
    const auto end = std::chrono::steady_clock::now() + most;
    while (!done() && std::chrono::steady_clock::now() < end) {
      for (Side* side : {&from, &to}) {
        side->worker->runLocked([](BulkLocked& locked) {
          while (ucp_worker_progress(locked.get()) != 0) {
          }
        });
      }
    }
  }
};

void testAChunkThatIsThereBefore(bool lastFirst) {
  Scene scene;
  const std::string bytes(2 * kSize, 'b');
  std::string into(2 * kSize, ' ');
  Answer sent[2];
  Answer received;
  const auto send = [&](size_t index) {
    scene.from.channel->send(
        scene.to.address,
        kTag + index,
        {{bytes.data(), kSize}},
        sent[index].callback());
  };
  const size_t early = lastFirst ? 1 : 0;
  send(early);
  scene.progressUntil(
      [&] { return scene.to.hasUnexpected(kTag + early); },
      std::chrono::seconds(20));
  require(scene.to.hasUnexpected(kTag + early), "nobody expects the chunk");
  const uint64_t id = scene.to.channel->receive(
      kTag,
      {{into.data(), kSize}, {into.data() + kSize, kSize}},
      received.callback(),
      nullptr);
  scene.progressUntil([] { return false; }, std::chrono::milliseconds(50));
  require(received.times == 0, "one chunk is missing");
  send(1 - early);
  scene.progressUntil(
      [&] { return received.times != 0; }, std::chrono::seconds(20));
  require(received.times == 1 && !received.error, "both have come");
  require(into == bytes, "the bytes are the sender's");
  scene.to.channel->cancel(id, {base::ErrorKind::kRefused, "too late"});
  require(received.times == 1, "each callback fires once");
}

// All chunks end while they are posted, and so does a receive that has none.
void testAllChunksAreThereBefore() {
  Scene scene;
  const std::string bytes(kSize, 'b');
  std::string into(kSize, ' ');
  Answer sent;
  Answer received;
  scene.from.channel->send(
      scene.to.address, kTag, {{bytes.data(), kSize}}, sent.callback());
  scene.progressUntil(
      [&] { return scene.to.hasUnexpected(kTag); }, std::chrono::seconds(20));
  scene.to.channel->receive(
      kTag, {{into.data(), kSize}}, received.callback(), nullptr);
  require(received.times == 1 && into == bytes, "received at once");
  scene.to.channel->receive(kTag, {}, received.callback(), nullptr);
  require(received.times == 2, "nothing to receive");
}

// The receiver has given up, and the sender does not know of it yet.
void testASendThatNobodyWants(size_t size, bool sendsFirst) {
  const std::string bytes(size, 'b');
  std::string into(size, ' ');
  Answer sent;
  Answer received;
  Scene scene;
  const auto send = [&] {
    scene.from.channel->send(
        scene.to.address, kTag, {{bytes.data(), size}}, sent.callback());
  };
  const uint64_t id = scene.to.channel->receive(
      kTag, {{into.data(), size}}, received.callback(), nullptr);
  if (sendsFirst) {
    send(); // on its way
  }
  scene.to.channel->cancel(id, {base::ErrorKind::kRefused, "not wanted"});
  require(received.times == 1 && received.error, "the receive ends");
  if (!sendsFirst) {
    send();
  }
  scene.progressUntil([&] { return sent.times != 0; }, std::chrono::seconds(5));
  require(sent.times == 1, "the send ends, too");
  scene.progressUntil([] { return false; }, std::chrono::milliseconds(50));
  require(!scene.to.hasUnexpected(kTag), "nothing of it is kept");
  require(into == std::string(size, ' '), "nothing is written");
}

// The sender has died, for example.
void testManyChunksThatNeverCome() {
  std::string into(kSize, ' ');
  Scene scene;
  for (uint64_t tag = kTag; tag < kTag + 5000; ++tag) {
    Answer received;
    const uint64_t id = scene.to.channel->receive(
        tag, {{into.data(), kSize}}, received.callback(), nullptr);
    scene.to.channel->cancel(id, {base::ErrorKind::kPeerLost, "died"});
    require(received.times == 1, "the receive ends");
  }
}

// The owner frees the memory when the callback has fired.
void testNothingIsWrittenAfterTheEnd() {
  const std::string bytes(kSize, 'b');
  std::string into(kSize, ' ');
  Answer sent;
  Scene scene;
  std::atomic<bool> over{false};
  std::thread pool([&] {
    while (!over.load()) {
      scene.poller.wait(/*timeoutMs=*/1);
    }
  });
  bool ended = false;
  scene.to.channel->receive(
      kTag,
      {{into.data(), kSize}},
      [&](const base::Error&) {
        scene.from.channel->send(
            scene.to.address, kTag, {{bytes.data(), kSize}}, sent.callback());
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        require(into == std::string(kSize, ' '), "the memory is its owner's");
        ended = true;
      },
      nullptr);
  scene.to.stop();
  require(ended, "stop() ends a receive");
  over.store(true);
  pool.join();
}

} // namespace

int main() {
  testAChunkThatIsThereBefore(/*lastFirst=*/false);
  testAChunkThatIsThereBefore(/*lastFirst=*/true);
  testAllChunksAreThereBefore();
  for (const size_t size : {kSize, kChunkBytes}) {
    testASendThatNobodyWants(size, /*sendsFirst=*/false);
    testASendThatNobodyWants(size, /*sendsFirst=*/true);
  }
  testManyChunksThatNeverCome();
  testNothingIsWrittenAfterTheEnd();
  return 0;
}
