// bulk::Exchange and its ways on one host, over a Link that only notes what the
// Link is told. pulled.cpp has the way between hosts.

#include "transport/ucx/incoming.h"
#include "unit/exchange_scene.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport;
using namespace torch_rpc_ext::transport::ucx;
using memory::SharedMap;
using stress::require;
using unit::Answer;
using unit::kSize;
using unit::kTooLargeToCarry;
using unit::plain;
using unit::Scene;
using unit::shared;

namespace {

void testLentMemoryComesBack() {
  Scene scene;
  Answer answer;
  BulkEntry entry;
  const auto map = SharedMap::create(kSize);
  const FrameHeader header = scene.send({shared(map)}, answer, entry);
  require(
      header.kind == FrameKind::kFrame && header.count == 1 &&
          header.transfer != 0,
      "a frame with bulk");
  require(
      entry.size == kSize && entry.region == map->region().id &&
          entry.fd == static_cast<uint64_t>(map->region().fd) &&
          entry.address != 0,
      "says where the memory is");
  const auto here = scene.exchange.map(entry);
  require(
      here != nullptr && here->isForeign() && here->data() != map->data(),
      "a peer can map it");
  scene.locked([&](Locked& held) {
    require(scene.exchange.pending(held), "the peer may be reading");
    scene.exchange.onAcknowledged(held, header.transfer | kKept);
    require(!scene.exchange.pending(held), "the peer has its own map");
    scene.exchange.onAcknowledged(held, header.transfer);
  });
  require(answer.times == 1 && !answer.error, "the memory is free");
  require(!map->discarded(), "and may be used again");
  scene.hear({.kind = FrameKind::kDone, .transfer = header.transfer});
  require(answer.times == 1, "once");
}

void testLentMemoryThatMustNotBeUsedAgain() {
  const base::Error why{base::ErrorKind::kOverloaded, "no room"};
  for (const int how : {0, 1, 2}) {
    Scene scene;
    Answer answer;
    BulkEntry entry;
    const auto map = SharedMap::create(kSize);
    const uint64_t id = scene.send({shared(map)}, answer, entry).transfer;
    if (how == 0) { // the peer refuses
      const base::Buffer text = encodeReason(why);
      scene.hear(
          {.kind = FrameKind::kDone,
           .count = static_cast<uint32_t>(why.kind),
           .transfer = id},
          {reinterpret_cast<const char*>(text.data()), text.size()});
      require(
          answer.error.kind == why.kind && answer.error.message == why.message,
          "the reason of the peer");
    } else if (how == 1) { // the peer has a forked child
      scene.hear({.kind = FrameKind::kDone, .transfer = id | kForked});
      require(!answer.error, "the message is through");
    } else { // the connection ends
      int held = 0;
      scene.locked([&](Locked& token) {
        scene.exchange.end(token, why, [&](Callback) { ++held; });
      });
      require(held == 1, "held while the peer may read");
    }
    require(answer.times == 1 && map->discarded(), "not used again");
  }
}

void testWhatIsReturned() {
  Scene scene;
  Answer answer;
  BulkEntry first;
  const auto one = SharedMap::create(kSize);
  const auto two = SharedMap::create(kSize);
  scene.send({shared(one), shared(two)}, answer, first);
  BulkEntry second;
  std::memcpy(
      &second,
      scene.link->told.back().second.data() + sizeof(second),
      sizeof(second));
  first.fd = second.fd = kReturned;
  BulkEntry wrong = first;
  wrong.size = 1;
  require(scene.exchange.map(wrong) == nullptr, "of another size");
  require(scene.exchange.map(first) == one, "the memory itself");
  require(answer.times == 0, "the other is still lent");
  require(scene.exchange.map(second) == two, "the other");
  require(answer.times == 1 && !answer.error, "nobody need acknowledge it");
  require(!one->discarded() && !two->discarded(), "free for their next use");
  require(scene.exchange.map(first) == nullptr, "comes back once");
  char byte = 0;
  const base::Error error = scene.fetch({first}, &byte);
  require(
      error.message == "the sender returns memory that it has not been sent",
      "is no memory of ours");
  scene.link->state = PeerState::kDead;
  scene.link->end = {base::ErrorKind::kPeerLost, "it died"};
  require(
      scene.fetch({first}, &byte).kind == base::ErrorKind::kPeerLost,
      "when a peer has died, nothing is lent to the peer any more");
  scene.link->state = PeerState::kOpen;

  require(
      SharedMap::open(
          getpid(), one->region().fd, one->region().id + 1, kSize) == nullptr,
      "the descriptor of another region");

  // What this end returns, it names.
  BulkEntry entry;
  const auto foreign =
      SharedMap::open(getpid(), one->region().fd, one->region().id, kSize);
  scene.send({shared(foreign)}, answer, entry);
  require(
      entry.region == one->region().id && entry.fd == kReturned,
      "the peer's own memory");
  foreign->discard(); // a fork has made it private
  scene.send({shared(foreign)}, answer, entry);
  require(entry.region == 0 && entry.address != 0, "is copied");
}

void testPeerReadsMemory() {
  Scene scene;
  Answer answer;
  BulkEntry entry;
  const std::string bytes(kSize, 'b');
  scene.send({plain(bytes)}, answer, entry);
  require(
      entry.region == 0 &&
          entry.address == reinterpret_cast<uint64_t>(bytes.data()),
      "may be read where it lies");
  std::string into(kSize, ' ');
  require(!scene.fetch({entry}, into.data()) && into == bytes, "is read");
  scene.link->state = PeerState::kDead;
  scene.link->end = {base::ErrorKind::kPeerLost, "it died"};
  require(
      scene.fetch({entry}, into.data()).message == "it died",
      "what was read from a peer that is gone cannot be trusted");

  BulkSpan filling = plain(bytes);
  filling.whenFilled = [](uint64_t, Callback) {};
  scene.send({filling}, answer, entry);
  require(entry.address == 0, "not before it is filled");
}

// A peer that has not heard of the end yet reads what was sent, and not what
// is written into that memory next.
void testABigFrameIsHeldAfterTheEnd() {
  Scene scene;
  Answer answer;
  BulkEntry entry;
  const FrameHeader header = scene.send({}, answer, entry, /*headBytes=*/kSize);
  require(header.kind == FrameKind::kBigFrame, "a big frame");
  std::vector<Callback> held;
  scene.locked([&](Locked& locked) {
    scene.exchange.end(
        locked,
        {base::ErrorKind::kPeerLost, "it broke at this end"},
        [&](Callback callback) { held.push_back(std::move(callback)); });
  });
  require(answer.times == 1 && held.size() == 1, "the message has failed");
  const std::string next(entry.size, 'X'); // would reuse freed memory
  std::string read(entry.size, 0);
  require(!scene.fetch({entry}, read.data()), "the memory can be read");
  require(read == std::string(entry.size, 'h'), "and is what was sent");
}

// The last frame that was sent.
std::pair<FrameHeader, std::string>& lastFrame(Scene& scene) {
  return *std::find_if(
      scene.link->told.rbegin(), scene.link->told.rend(), [](const auto& told) {
        return told.first.kind == FrameKind::kFrame;
      });
}

// The last frame that was sent, at its receiver, which is this end too.
base::Result<std::unique_ptr<Incoming>> arrive(
    Scene& scene,
    uint64_t maxBytes = 0) {
  const auto& [header, data] = lastFrame(scene);
  base::Result<std::unique_ptr<Incoming>> incoming =
      base::Error{base::ErrorKind::kInvalid, ""};
  scene.locked([&](Locked& held) {
    incoming = makeIncoming(
        held,
        scene.exchange.keep(),
        header.transfer,
        header.count,
        {data.data(), data.size()},
        maxBytes);
  });
  return incoming;
}

// Writes an entry into the table of the last frame that was sent.
void forge(Scene& scene, size_t index, const BulkEntry& entry) {
  std::string& data = lastFrame(scene).second;
  std::memcpy(data.data() + index * sizeof(entry), &entry, sizeof(entry));
}

base::MutableSpan all(std::string& into) {
  return {into.data(), into.size()};
}

void testSmallBulkIsCarried() {
  Scene scene(/*sameHost=*/false);
  Answer answer;
  BulkEntry entry;
  const std::string first(kSize, 'b');
  const std::string second(7, 'c');
  const uint64_t id =
      scene.send({plain(first), plain(""), plain(second)}, answer, entry)
          .transfer;
  require(
      entry.size == kSize && isCarried(entry) && entry.address == 0,
      "the table says so");
  auto incoming = arrive(scene);
  require(incoming.ok(), "a frame");
  const base::ConstSpan head = incoming.value()->head();
  require(
      head.size == 1 && *static_cast<const char*>(head.data) == 'h' &&
          incoming.value()->bulkSizes() ==
              std::vector<uint64_t>{first.size(), 0, second.size()} &&
          incoming.value()->bytesToCopy() == first.size() + second.size(),
      "with bulk, for which the receiver finds memory");
  std::string into(kSize, ' ');
  std::string behind(second.size(), ' ');
  Answer received;
  incoming.value()->receive(
      {all(into), {}, all(behind)}, received.callback(), nullptr);
  require(
      received.times == 1 && !received.error && into == first &&
          behind == second,
      "that is there");
  require(scene.link->told.size() == 1, "nobody was asked");
  scene.locked([&](Locked& held) {
    require(!scene.exchange.pending(held), "the peer does not read here");
    require(answer.times == 0, "the sender waits until it is taken");
    scene.exchange.onAcknowledged(held, id);
  });
  require(answer.times == 1 && !answer.error, "and hears that");
}

void testOnlyLittleIsCarried() {
  Scene scene(/*sameHost=*/false);
  Answer answer;
  BulkEntry entry;
  const auto isSentCarried = [&](size_t bytes,
                                 int spans = 1,
                                 size_t headBytes = 1) {
    const std::string text(bytes, 'b');
    scene.send(
        std::vector<BulkSpan>(spans, plain(text)), answer, entry, headBytes);
    return isCarried(entry);
  };
  const auto acknowledge = [&](uint64_t transfer, const base::Error& why = {}) {
    scene.locked([&](Locked& held) {
      scene.exchange.onAcknowledged(held, transfer, why);
    });
  };
  require(!isSentCarried((256 << 10) + 1), "not a large tensor");
  require(!isSentCarried(90'000, 3), "nor many that are large together");
  require(!isSentCarried(10, 1, 70'000), "nor beside a large head");
  BulkSpan filling = plain("later");
  filling.whenFilled = [](uint64_t, Callback) {};
  scene.send({filling}, answer, entry);
  require(!isCarried(entry), "nor what is not there yet");
  require(isSentCarried(256 << 10), "as much as fits");
  const uint64_t id = scene.link->told.back().first.transfer;
  require(isSentCarried(256 << 10), "twice");
  require(!isSentCarried(1), "no more before the receiver has taken some");
  acknowledge(id + 2); // what was not carried gives nothing back
  require(!isSentCarried(1), "whatever else it has taken");
  acknowledge(id, {base::ErrorKind::kRefused, "no room"});
  acknowledge(id);
  require(isSentCarried(256 << 10), "then again, once, also if it refused");
  require(!isSentCarried(1), "no more");

  Scene quiet(/*sameHost=*/false);
  quiet.link->silentFor = std::chrono::milliseconds(51);
  const std::string bytes(30 << 10, 'b');
  quiet.send({plain(bytes)}, answer, entry);
  require(isCarried(entry), "a peer that says nothing gets a little");
  quiet.send({plain(bytes)}, answer, entry);
  require(!isCarried(entry), "which fits into its kernel's buffer");

  Scene near(/*sameHost=*/true, /*onlyTcp=*/true);
  near.send({plain("bulk")}, answer, entry);
  require(!isCarried(entry), "and nothing to who can read our memory");
}

void testMoreThanTheReceiverTakes() {
  Scene scene(/*sameHost=*/false);
  Answer answer;
  BulkEntry entry;
  const std::string bytes(200'000, 'b');
  scene.send({plain(bytes)}, answer, entry);
  auto first = arrive(scene);
  auto second = arrive(scene);
  require(first.ok() && second.ok(), "as much as its sender may");
  require(
      arrive(scene).error().message ==
          "the peer sends more bulk in frames than it may",
      "no more");
  first.value()->refuse({base::ErrorKind::kRefused, "not this one"});
  auto third = arrive(scene);
  require(third.ok(), "what is refused does not count");
  std::string into(bytes.size(), ' ');
  Answer received;
  second.value()->receive({all(into)}, received.callback(), nullptr);
  require(arrive(scene).ok(), "nor what was copied");
  third.value().reset();
  first.value().reset();
  second.value().reset();
  require(arrive(scene).ok() && arrive(scene).ok(), "nor what was dropped");
  const size_t frame = sizeof(entry) + bytes.size() + 1;
  require(arrive(scene, frame).ok(), "max_message_bytes counts it");
  require(
      arrive(scene, frame - 1).error().kind == base::ErrorKind::kRefused,
      "once");
}

void testATableThatLies() {
  Scene scene(/*sameHost=*/false);
  Answer answer;
  BulkEntry entry;
  const std::string bytes(kSize, 'b');
  scene.send({plain(bytes), plain(bytes)}, answer, entry);
  // The head has one byte, which may be taken for bulk, but no second one.
  for (const uint64_t size : {kSize + 2, size_t{1} << 40, ~size_t{0}}) {
    forge(scene, 1, {.size = size, .fd = kCarried});
    require(
        arrive(scene).error().message ==
            "a frame carries less bulk than its table says",
        "more than there is");
  }
  forge(scene, 1, {.size = kSize + 1, .fd = kCarried});
  require(arrive(scene).value()->head().size == 0, "all there is");

  // Addresses and regions mean nothing beside carried bulk.
  forge(scene, 0, {.size = 3, .address = 1, .region = 1, .fd = kCarried});
  forge(scene, 1, {.size = 10, .address = 1});
  auto incoming = arrive(scene);
  require(incoming.value()->map(0) == nullptr, "cannot be mapped");
  std::string into(3, ' ');
  std::string other(10, ' ');
  Answer received;
  incoming.value()->receive(
      {all(into), all(other)}, received.callback(), nullptr);
  require(into == "bbb", "is in the frame");
  require(
      scene.link->told.back().first.kind == FrameKind::kPull,
      "and the rest is asked for");
  base::Buffer frame(sizeof(entry) + 3);
  entry = {.size = 3, .fd = kCarried};
  std::memcpy(frame.data(), &entry, sizeof(entry));
  require(
      makeBigIncoming(scene.exchange.keep(), 1, 1, std::move(frame), 0)
              .error()
              .message == "a frame that is fetched carries bulk",
      "a frame that was asked for carries nothing");
  scene.locked([&](Locked& held) {
    scene.exchange.end(held, {base::ErrorKind::kPeerLost, "it died"}, nullptr);
  });
  scene.resources.close();
  scene.resources.stop();
}

// max_message_bytes counts for a frame with bulk only if the frame has a
// transfer: its sender then hears that it is refused.
void testBulkWithoutATransfer() {
  const auto isRefused = [](const FrameHeader& header) {
    return !parseHeader({&header, sizeof(header)}).ok();
  };
  Scene scene;
  Answer answer;
  BulkEntry entry;
  for (const size_t headBytes : {1, 70'000}) {
    FrameHeader header = scene.send({plain("bulk")}, answer, entry, headBytes);
    require(!isRefused(header), "a frame with bulk");
    header.transfer = 0;
    require(isRefused(header), "of which nobody could be told");
    header.kind = FrameKind::kFrame;
    header.count = 0;
    require(!isRefused(header), "a frame without bulk");
  }
}

void testNothingToFetch() {
  Scene scene(/*sameHost=*/false);
  char byte = 0;
  require(!scene.fetch({BulkEntry{}, BulkEntry{}}, &byte), "empty spans");
  require(scene.link->told.empty(), "the peer is not asked");
}

void testAcknowledgements() {
  Scene scene;
  const auto last = [&] { return scene.link->told.back().first; };
  scene.exchange.done(1, kSize, {});
  scene.exchange.done(2, kSize, {});
  require(
      scene.link->told.empty() && scene.link->asked == 1,
      "wait for the next message");
  Answer answer;
  BulkEntry entry;
  scene.send({plain("bulk")}, answer, entry);
  require(last().acknowledged == 2, "one travels with each message");
  scene.locked([&](Locked& held) { scene.exchange.acknowledge(held); });
  require(
      last().kind == FrameKind::kDone && last().transfer == 1,
      "the others alone, after a while");
  scene.exchange.done(3, uint64_t{1} << 30, {});
  require(last().transfer == 3, "much memory at once");
  scene.exchange.done(
      4, 0, {base::ErrorKind::kRefused, std::string(1000, 'x')});
  require(
      last().transfer == 4 &&
          last().count == static_cast<uint32_t>(base::ErrorKind::kRefused) &&
          scene.link->told.back().second.size() == 512,
      "a refusal at once");

  const size_t before = scene.link->told.size();
  scene.exchange.done(5 | kKept, 0, {});
  scene.exchange.done(6 | kKept, 0, {});
  scene.exchange.done(5, 0, {});
  require(scene.link->asked == 2, "asked once more");
  scene.locked([&](Locked& held) { scene.exchange.acknowledge(held); });
  require(
      scene.link->told.size() == before + 1 && last().transfer == (6 | kKept) &&
          last().acknowledged == 5,
      "what was kept shortly is only free");
}

void testBigFrame() {
  Scene scene;
  Answer answer;
  BulkEntry entry;
  const FrameHeader header = scene.send({}, answer, entry, 70'000);
  require(
      header.kind == FrameKind::kBigFrame && header.count == 0 &&
          entry.size == 70'000,
      "the frame itself is fetched");
  std::string into(entry.size, ' ');
  require(
      !scene.fetch({entry}, into.data()) && into == std::string(70'000, 'h'),
      "as bulk is");
  scene.hear({.kind = FrameKind::kDone, .transfer = header.transfer});
  require(answer.times == 1, "is through");
}

} // namespace

int main() {
  testLentMemoryComesBack();
  testLentMemoryThatMustNotBeUsedAgain();
  testWhatIsReturned();
  testPeerReadsMemory();
  testABigFrameIsHeldAfterTheEnd();
  testSmallBulkIsCarried();
  testOnlyLittleIsCarried();
  testMoreThanTheReceiverTakes();
  testATableThatLies();
  testBulkWithoutATransfer();
  testNothingToFetch();
  testAcknowledgements();
  testBigFrame();
  return 0;
}
