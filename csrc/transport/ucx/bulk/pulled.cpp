#include "base/log.h"
#include "transport/ucx/bulk/chunks.h"
#include "transport/ucx/bulk/way.h"

#include <atomic>
#include <chrono>
#include <unordered_map>
#include <utility>

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

// Bulk with fewer bytes goes through UCX also where there are lanes: below this
// size UCX is as fast as lanes, or faster.
constexpr uint64_t kMinLaneBytes = 512u << 10;

using Clock = std::chrono::steady_clock;
constexpr Clock::time_point kAtOnce{};
// Where no lane can be opened, because the ports of the range are taken, for
// example, the next attempt comes after this time: ports become free again.
constexpr std::chrono::seconds kLanesAgain{5};

// Bulk that the receiver asks for with kPull, and that then travels over a
// Channel: the only way that needs nothing but a network.
//
// Owns: the table of what this end has asked for.
class Pulled final : public Way {
 public:
  explicit Pulled(const Ends& ends)
      : ends_(ends),
        chunks_(
            ends.peer.sendKey.empty() ? plainChunks()
                                      : sealedChunks(
                                            ends.resources.runner(),
                                            ends.peer.sendKey,
                                            ends.peer.receiveKey)) {}

  bool takes(const std::vector<BulkEntry>&) const override {
    return true;
  }

  void fetch(Fetch fetch) override {
    PullRequest request;
    request.firstSpan = fetch.firstSpan;
    request.spanCount = static_cast<uint32_t>(fetch.into.size());
    uint64_t bytes = 0;
    for (const auto& span : fetch.into) {
      bytes += span.size;
    }
    if (bytes == 0) { // the spans of the peer may all be empty
      fetch.callback({});
      return;
    }
    const bool byLanes = bytes >= kMinLaneBytes &&
        !ends_.peer.reachesUsAt.empty() && Clock::now() >= lanesFrom_.load();
    auto chosen =
        choose(byLanes ? ChannelKind::kLanes : ChannelKind::kUcx, request);
    if (!chosen.ok()) {
      fetch.callback(chosen.error());
      return;
    }
    const auto channel = chosen.value();
    request.tag = ends_.resources.reserveTags(chunks_->tagsFor(fetch.into));
    const auto kept = ends_.link.keep();
    const uint64_t receive = chunks_->receive(
        *channel,
        request.tag,
        std::move(fetch.into),
        [this, kept, tag = request.tag, callback = std::move(fetch.callback)](
            const base::Error& error) {
          ends_.link.worker().post(
              [this, kept, tag](Locked&) { pulls_.erase(tag); });
          callback(error);
        },
        std::move(fetch.arrived));
    ends_.link.worker().post(
        [this, kept, channel, receive, transfer = fetch.transfer, request](
            Locked& locked) {
          const Pull pull{channel, receive, transfer};
          if (isOver(ends_.link.peer())) {
            cancel(locked, pull, ends_.link.ending());
            return;
          }
          pulls_.emplace(request.tag, pull);
          ends_.link.tell(
              locked,
              {.kind = FrameKind::kPull, .transfer = transfer},
              encode(request));
        });
  }

  bool onMessage(Locked& locked, const Message& message) override {
    const FrameHeader& header = message.header;
    switch (header.kind) {
      case FrameKind::kPull:
        if (base::Error error = onPull(locked, header.transfer, message.data)) {
          ends_.link.giveUp(locked, std::move(error));
        }
        return true;
      case FrameKind::kAbort: {
        const base::Error reason = reasonOf(message);
        const base::Error why{
            reason ? reason.kind : base::ErrorKind::kRefused,
            "the sender gave the bulk up: " + toText(message.data)};
        for (const auto& [tag, pull] : pulls_) {
          if (pull.transfer == header.transfer) {
            cancel(locked, pull, why);
          }
        }
        return true;
      }
      default:
        return false;
    }
  }

  void end(Locked& locked, const base::Error& why) override {
    for (const auto& [tag, pull] : std::exchange(pulls_, {})) {
      cancel(locked, pull, why);
    }
  }

 private:
  // What this end has asked for.
  struct Pull {
    std::shared_ptr<Channel> channel;
    uint64_t receive = 0; // the id of the receive on the channel
    uint64_t transfer = 0; // the peer's number
  };

  // The channel for what comes from the peer. Writes into `request` where the
  // peer has to send it.
  base::Result<std::shared_ptr<Channel>> choose(
      ChannelKind kind,
      PullRequest& request) {
    auto channel = ends_.resources.channel(kind);
    auto address = channel.ok() ? channel.value()->addressFor(ends_.peer)
                                : base::Result<std::string>(channel.error());
    if (address.ok()) {
      request.channel = kind;
      request.bulkAddress = address.value();
      return channel;
    }
    if (kind == ChannelKind::kUcx ||
        address.error().kind == base::ErrorKind::kShutDown) {
      return address.error();
    }
    // For example, no port is left in the range, or no descriptor.
    if (lanesFrom_.exchange(Clock::now() + kLanesAgain) == kAtOnce) {
      base::log(
          base::LogLevel::kWarning,
          "large tensors come through UCX, which is slower: " +
              address.error().message);
    }
    return choose(ChannelKind::kUcx, request);
  }

  static void cancel(Locked& locked, const Pull& pull, const base::Error& why) {
    locked.defer([pull, why] { pull.channel->cancel(pull.receive, why); });
  }

  base::Error onPull(Locked& locked, uint64_t id, base::ConstSpan data) {
    auto request = parsePullRequest(data);
    const Spans* const all = ends_.transfers.find(locked, id);
    if (!request.ok() || !ends_.transfers.wasAdded(locked, id)) {
      return {
          base::ErrorKind::kInvalid,
          "the peer asked for bulk that does not exist"};
    }
    if (all == nullptr) {
      // The send of the frame failed here when all of its bytes had arrived
      // there, so the peer goes on to the bulk.
      ends_.link.tellReason(
          locked,
          FrameKind::kAbort,
          id,
          {base::ErrorKind::kPeerLost,
           "the other end has given the message up"});
      return {};
    }
    const PullRequest& pull = request.value();
    if (pull.firstSpan > all->size() ||
        pull.spanCount > all->size() - pull.firstSpan) {
      return {
          base::ErrorKind::kInvalid,
          "the peer asked for bulk spans that do not exist"};
    }
    if (!ends_.transfers.sendBegins(locked, id)) {
      return {
          base::ErrorKind::kInvalid, "the peer asked for the same bulk again"};
    }
    const auto begin = all->begin() + pull.firstSpan;
    locked.defer([this,
                  kept = ends_.link.keep(),
                  id,
                  pull,
                  spans = Spans(begin, begin + pull.spanCount)] {
      send(pull, spans, [this, kept, id](const base::Error& failure) {
        ends_.link.whenJudged(failure, [this, kept, id](const auto& error) {
          ends_.link.worker().post([this, kept, id, error](Locked& later) {
            sendEnded(later, id, error);
          });
        });
      });
    });
    return {};
  }

  void send(const PullRequest& pull, const Spans& spans, Callback callback) {
    auto channel = ends_.resources.channel(pull.channel);
    if (!channel.ok()) {
      callback(channel.error());
      return;
    }
    chunks_->send(
        channel.value(),
        pull,
        spans,
        [this, kept = ends_.link.keep()] { return isOver(ends_.link.peer()); },
        std::move(callback));
  }

  // The memory is not read any more. If the send failed, the peer is told
  // to stop waiting for the rest. The peer then answers the call with an error,
  // and this answer must not overtake the real reason: so this end's callback
  // gets that reason first.
  void sendEnded(Locked& locked, uint64_t id, const base::Error& error) {
    ends_.transfers.sendEnds(locked, id, error); // defers the callback
    if (!error) {
      return;
    }
    locked.defer([this, kept = ends_.link.keep(), id, error] {
      ends_.link.worker().post([this, kept, id, error](Locked& later) {
        if (ends_.link.peer() == PeerState::kOpen) {
          ends_.link.tellReason(later, FrameKind::kAbort, id, error);
        }
      });
    });
  }

  const Ends ends_;
  const std::shared_ptr<const Chunks> chunks_;
  std::unordered_map<uint64_t, Pull> pulls_; // by the first tag
  // Lanes are not tried before this time.
  std::atomic<Clock::time_point> lanesFrom_{kAtOnce};
};

} // namespace

std::unique_ptr<Way> pulled(const Ends& ends) {
  return std::make_unique<Pulled>(ends);
}

} // namespace torch_rpc_ext::transport::ucx::bulk
