// Bulk that goes to another host: the receiver asks for it, and it comes
// through a channel.

#include "unit/exchange_scene.h"
#include "unit/no_descriptors.h"

#include <string>
#include <utility>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport;
using namespace torch_rpc_ext::transport::ucx;
using stress::require;
using unit::Answer;
using unit::kSize;
using unit::kTooLargeToCarry;
using unit::NoDescriptors;
using unit::plain;
using unit::Scene;

namespace {

void testAnotherHost() {
  Scene scene(/*sameHost=*/false);
  Answer answer;
  BulkEntry entry;
  const std::string bytes(kTooLargeToCarry, 'b');
  const uint64_t id = scene.send({plain(bytes)}, answer, entry).transfer;
  require(
      entry.size == kTooLargeToCarry && entry.fd == 0 && entry.address == 0 &&
          entry.region == 0,
      "nothing but the size");
  require(
      !scene.exchange.maps({.size = 1, .address = 1, .region = 1, .fd = 1}),
      "the peer's memory cannot be mapped");
  const auto ask = [&](uint64_t transfer, uint32_t spans) {
    scene.link->state = PeerState::kOpen;
    scene.link->end = {};
    const base::Buffer data =
        encode(PullRequest{.spanCount = spans, .bulkAddress = "somewhere"});
    scene.hear(
        {.kind = FrameKind::kPull, .transfer = transfer},
        {reinterpret_cast<const char*>(data.data()), data.size()});
    return scene.link->end.message;
  };
  require(
      ask(id + 1, 1) == "the peer asked for bulk that does not exist",
      "no such transfer");
  require(
      ask(id, 2) == "the peer asked for bulk spans that do not exist",
      "no such span");
  scene.resources.close(); // so nothing is sent
  require(ask(id, 1).empty(), "asks for the bulk");
  require(
      answer.times == 1 && answer.error.kind == base::ErrorKind::kShutDown,
      "which does not come");
  require(
      scene.link->told.back().first.kind == FrameKind::kAbort,
      "and the peer hears why");
}

// The send of the frame fails at its end, when the receiver has all of the
// frame and goes on to the bulk.
void testBulkOfAMessageThatWasGivenUp() {
  Scene scene(/*sameHost=*/false);
  Answer answer;
  BulkEntry entry;
  const std::string bulk(kTooLargeToCarry, 'b');
  const FrameHeader header =
      scene.send({plain(bulk)}, answer, entry, /*headBytes=*/kSize);
  require(header.kind == FrameKind::kBigFrame, "a big frame");
  scene.resources.close(); // so no send succeeds
  for (const uint32_t span : {0, 1}) {
    const base::Buffer data = encode(
        PullRequest{
            .firstSpan = span, .spanCount = 1, .bulkAddress = "somewhere"});
    scene.link->told.clear();
    scene.hear(
        {.kind = FrameKind::kPull, .transfer = header.transfer},
        {reinterpret_cast<const char*>(data.data()), data.size()});
    require(answer.times == 1 && answer.error, "the message has failed");
    require(
        scene.link->state == PeerState::kOpen, "the connection has not ended");
    require(
        scene.link->told.size() == 1 &&
            scene.link->told[0].first.kind == FrameKind::kAbort &&
            scene.link->told[0].first.transfer == header.transfer,
        "the peer hears that nothing comes");
  }
}

void testASenderWithoutDescriptors() {
  Scene scene(/*sameHost=*/false);
  Answer answer;
  BulkEntry entry;
  const std::string bytes(kTooLargeToCarry, 'b');
  const uint64_t id = scene.send({plain(bytes)}, answer, entry).transfer;
  const base::Buffer data = encode(
      PullRequest{
          .spanCount = 1,
          .channel = ChannelKind::kLanes,
          .bulkAddress = "somewhere"});
  const NoDescriptors none;
  scene.hear(
      {.kind = FrameKind::kPull, .transfer = id},
      {reinterpret_cast<const char*>(data.data()), data.size()});
  require(
      answer.times == 1 && answer.error.kind == base::ErrorKind::kSystem,
      "the message fails");
  require(
      scene.link->told.back().first.kind == FrameKind::kAbort,
      "and the peer hears why");
}

void testAReceiverWithoutDescriptors() {
  Scene scene(/*sameHost=*/false);
  require(scene.resources.channel(ChannelKind::kUcx).ok(), "UCX needs no more");
  std::string into(1u << 20, ' ');
  Answer answer;
  {
    const NoDescriptors none;
    scene.exchange.fetch(
        {.transfer = 1,
         .from = {BulkEntry{.size = into.size()}},
         .into = {{into.data(), into.size()}},
         .callback = answer.callback()});
  }
  const auto& [header, data] = scene.link->told.back();
  auto request = parsePullRequest({data.data(), data.size()});
  require(
      header.kind == FrameKind::kPull && request.ok() &&
          request.value().channel == ChannelKind::kUcx,
      "the bulk comes through UCX");
  scene.locked([&](Locked& held) {
    scene.exchange.end(held, {base::ErrorKind::kPeerLost, "it died"}, nullptr);
  });
  scene.resources.close();
  scene.resources.stop();
  require(answer.times == 1, "the fetch ends");
}

} // namespace

int main() {
  testAnotherHost();
  testBulkOfAMessageThatWasGivenUp();
  testASenderWithoutDescriptors();
  testAReceiverWithoutDescriptors();
  return 0;
}
