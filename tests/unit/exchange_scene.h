#pragma once

#include "sanitize/stress.h"
#include "transport/ucx/bulk/exchange.h"
#include "unit/answer.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::unit {

using namespace transport;
using namespace transport::ucx;

inline constexpr size_t kSize = 100'000;
inline constexpr size_t kTooLargeToCarry = 300'000;

class AtOnce final : public base::TaskRunner {
 public:
  void submit(base::TaskPtr task) override {
    task->run();
  }
};

class Notes final : public bulk::Link,
                    public std::enable_shared_from_this<Notes> {
 public:
  explicit Notes(std::shared_ptr<ControlWorker> worker)
      : worker_(std::move(worker)) {}

  ControlWorker& worker() const override {
    return *worker_;
  }
  std::shared_ptr<void> keep() override {
    return shared_from_this();
  }
  PeerState peer() const override {
    return state;
  }
  std::chrono::steady_clock::duration silence(Locked&) const override {
    return silentFor;
  }
  const base::Error& ending() const override {
    return end;
  }
  void tell(Locked& locked, FrameHeader header, base::Buffer data) override {
    header.acknowledged = exchange->nextAcknowledgement(locked);
    told.emplace_back(
        header,
        std::string(reinterpret_cast<const char*>(data.data()), data.size()));
  }
  void giveUp(Locked&, base::Error why) override {
    state = PeerState::kBroken;
    end = std::move(why);
  }
  void acknowledgeSoon(Locked&) override {
    ++asked;
  }
  void whenJudged(base::Error error, Callback callback) override {
    callback(error);
  }

  std::unique_ptr<bulk::Exchange> exchange;
  PeerState state = PeerState::kOpen;
  base::Error end;
  std::chrono::milliseconds silentFor{0};
  std::vector<std::pair<FrameHeader, std::string>> told;
  int asked = 0; // to acknowledge soon

 private:
  const std::shared_ptr<ControlWorker> worker_;
};

// An exchange with this very process, whose memory can be read.
struct Scene {
  AtOnce runner;
  base::Poller poller;
  std::shared_ptr<base::Gate> gate = std::make_shared<base::Gate>();
  std::shared_ptr<UcpContext> ucp = UcpContext::create({}).value();
  bulk::Resources resources{
      [this] { return BulkWorker::create(ucp, gate); },
      gate,
      {}};
  std::shared_ptr<Notes> link =
      std::make_shared<Notes>(ControlWorker::create(ucp, gate).value());
  bulk::Exchange& exchange;

  explicit Scene(bool sameHost = true) : Scene(sameHost, !sameHost) {}
  Scene(bool sameHost, bool onlyTcp) : exchange(make(sameHost, onlyTcp)) {}

  bulk::Exchange& make(bool sameHost, bool onlyTcp) {
    resources.start(poller, runner, [] {});
    bulk::Peer peer{
        .pid = getpid(),
        .mayReadHere = sameHost,
        .whyUnreadable = sameHost ? "" : "another host"};
    if (onlyTcp) {
      peer.reachesUsAt = {"127.0.0.1"};
    }
    link->exchange =
        std::make_unique<bulk::Exchange>(*link, resources, std::move(peer));
    return *link->exchange;
  }

  template <typename F>
  void locked(F&& use) {
    link->worker().runLocked(use);
  }

  // Returns the header; puts the first entry of the table into `entry`.
  FrameHeader send(
      std::vector<BulkSpan> spans,
      Answer& answer,
      BulkEntry& entry,
      size_t headBytes = 1) {
    base::Buffer head(headBytes);
    std::memset(head.data(), 'h', head.size());
    locked([&](Locked& held) {
      exchange.send(held, std::move(head), std::move(spans), answer.callback());
    });
    std::memcpy(&entry, link->told.back().second.data(), sizeof(entry));
    return link->told.back().first;
  }

  void hear(FrameHeader header, const std::string& data = {}) {
    locked([&](Locked& held) {
      exchange.onMessage(held, {header, {data.data(), data.size()}});
    });
  }

  // The error that fetching these entries leads to.
  base::Error fetch(std::vector<BulkEntry> from, void* into) {
    Answer answer;
    std::vector<base::MutableSpan> spans;
    for (const BulkEntry& entry : from) {
      spans.push_back({into, entry.size});
    }
    exchange.fetch(
        {.transfer = 1,
         .from = std::move(from),
         .into = std::move(spans),
         .callback = answer.callback()});
    stress::require(answer.times == 1, "a fetch ends");
    return answer.error;
  }
};

inline BulkSpan shared(const std::shared_ptr<memory::SharedMap>& map) {
  BulkSpan span{{map->data(), map->size()}};
  span.map = map;
  return span;
}

inline BulkSpan plain(const std::string& bytes) {
  return BulkSpan{{bytes.data(), bytes.size()}};
}

} // namespace torch_rpc_ext::unit
