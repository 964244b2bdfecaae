#pragma once

#include "transport/transport.h"
#include "transport/ucx/handshake.h"
#include "transport/ucx/peer_watch.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/secure_channel.h"
#include "transport/ucx/transfers.h"
#include "transport/ucx/worker.h"

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

class UcxContext;

// One UCX endpoint and what is under way on it.
//
// Owns: the endpoint, unsent frames, bulk that the peer has not yet taken.
// Thread: any.
// Outlives: nothing; UcxContext keeps it until its endpoint is closed.
class UcxConnection final : public Connection,
                            public std::enable_shared_from_this<UcxConnection> {
 public:
  static std::shared_ptr<UcxConnection> create(
      std::shared_ptr<UcxContext> context,
      uint64_t localToken,
      bool initiator);

  void send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback)
      override;
  void close() override;
  void lose(const base::Error& why) override;
  PeerState peer() const override {
    return watch_->state();
  }
  bool sharesMemory() const override;
  bool sendsPieces() const override;
  PathInfo path() const override;

  // Moves the peer's bulk spans [first, first + into.size()) of `transfer`
  // here, in the best way there is. `arrived` as in Incoming::receive().
  void fetch(
      uint64_t transfer,
      uint32_t first,
      const std::vector<BulkEntry>& from,
      const std::vector<base::MutableSpan>& into,
      Callback callback,
      Incoming::Arrived arrived);
  // Tells the peer that the memory of `transfer`, `bytes` in all, is its own
  // again: now, or soon when it went well and is little.
  void done(uint64_t transfer, uint64_t bytes, const base::Error& error);
  // Whether map() is worth trying.
  bool maps(const BulkEntry& entry) const;
  // The peer's shared memory itself; null if there is none, or it cannot be
  // had.
  std::shared_ptr<memory::SharedMap> map(const BulkEntry& entry);
  // Our own shared memory that the peer gives back; null if it has none such.
  std::shared_ptr<memory::SharedMap> takeBack(const BulkEntry& entry);

  // Passes `error` on to `callback`; one that says that the peer is lost only
  // once it is known what has become of the peer, as the reason for that.
  void whenJudged(base::Error error, Callback callback);
  // Why it is over, once it is.
  const base::Error& ending() const {
    return watch_->why();
  }

  // Around the delivery of each frame: a thread may still carry one to the
  // Handler while another sees the end of the connection. What ends last tells
  // the Handler of the end.
  void deliveryBegins() {
    deliveries_.fetch_add(1);
  }
  void deliveryEnds();
  bool initiator() const {
    return initiator_;
  }
  ControlWorker& worker() const;

  // The handshake, in the order of its messages: we open, ...
  base::Error
  open(Locked& locked, const ContextAddress& peer, const std::string& hello);
  // ... the peer has opened, and may, ...
  base::Error accept(
      Locked& locked,
      uint64_t door,
      std::string opener,
      Preamble peer,
      const std::string& hello);
  // ... the peer has accepted, ...
  base::Error onAccepted(Locked& locked, const Signed& accepter);
  // ... the peer has confirmed. From the last two on frames flow.
  base::Error onConfirm(Locked& locked, base::ConstSpan proof);
  void sendRefusal(Locked& locked, uint64_t token, const std::string& why);
  // To the peer of a connection that broke here, and that may go on sending.
  // Returns whether there was a way to tell it.
  bool tellThatItBroke(Locked& locked);
  // Its endpoint is kept open no longer: see UcxContext::park().
  void leavePark(Locked& locked);
  // The message inside of one that is encrypted.
  base::Result<SecureChannel::Opened>
  unseal(Locked& locked, const FrameHeader& header, base::ConstSpan data);
  bool encrypted(Locked&) const {
    return channel_ != nullptr;
  }
  // Messages that overtook the end of the handshake, in their order.
  using EarlyMessages = std::vector<std::pair<FrameHeader, base::Buffer>>;
  void
  keepEarly(Locked& locked, const FrameHeader& header, base::ConstSpan data);
  EarlyMessages takeEarly(Locked&) {
    return std::move(early_);
  }
  void onPull(Locked& locked, uint64_t transfer, base::ConstSpan data);
  void onDone(Locked& locked, uint64_t transfer, base::Error error);
  // Bulk that was asked for does not come.
  void onAbort(Locked& locked, uint64_t transfer, const base::Error& why);
  // What somebody has to say about the peer; see PeerWatch. When it ends the
  // connection, all is released that the peer cannot read any more, and the
  // Handler is told when it has seen all frames.
  void hear(Locked& locked, PeerWord word, base::Error why = {}) {
    watch_->hear(locked, word, std::move(why));
  }
  void closeNow(Locked& locked);
  // This worker ends it, for `error`. With `flush`, what was sent leaves first.
  void fail(Locked& locked, base::Error error, bool flush = false);
  // UCX says so, of its endpoint.
  void onPathLost(Locked& locked, ucp_ep_h endpoint, ucs_status_t status);
  // The peer's process has had its time to be seen to end.
  void onDoubtOver(Locked& locked);
  // UCX says whether a message has left.
  void onSent(Locked& locked, ucs_status_t status);
  // Sends what done() has put off.
  void acknowledge(Locked& locked);

  // The handshake is over: whoever sends is known.
  bool established(Locked&) const {
    return established_;
  }
  // The peer may still be reading our memory.
  bool lending(Locked& locked) const {
    return transfers_.lending(locked);
  }

 private:
  struct ActiveSend;
  struct Closing;
  struct Unsent {
    base::Buffer head;
    std::vector<BulkSpan> bulk;
    Callback callback;
  };

  void meet(Locked& locked, const ProcessIdentity& peer);
  void partWays(Locked& locked);
  base::Error openEndpoint(Locked& locked, const WorkerAddress& address);
  std::string introduce(Locked& locked, const std::string& hello);
  base::Error prepareKeys(Locked& locked);
  base::Error agreeOnEncryption(
      Locked& locked,
      std::unique_ptr<SecureChannel>& channel);
  void establish(Locked& locked);
  void sendOrKeep(Locked& locked, Unsent& frame);
  void sendNow(Locked& locked, Unsent frame);
  void sendActive(Locked& locked, FrameHeader header, base::Buffer data);
  void deferCallback(Locked& locked, Callback callback, base::Error error);
  void sendBulk(
      const PullRequest& pull,
      const std::vector<BulkSpan>& spans,
      Callback callback);
  void sendEnded(Locked& locked, uint64_t transfer, const base::Error& error);
  void sendReason(
      Locked& locked,
      FrameKind kind,
      uint64_t transfer,
      const base::Error& error);
  void pull(
      uint64_t transfer,
      uint32_t first,
      const std::vector<base::MutableSpan>& into,
      Callback callback,
      Incoming::Arrived arrived);
  UcxConnection(
      std::shared_ptr<UcxContext> context,
      uint64_t localToken,
      bool initiator);
  bool open() const {
    return peer() == PeerState::kOpen;
  }
  void onPeerChanged(Locked& locked, PeerState before);
  void end(Locked& locked);
  void closeEndpoint(Locked& locked, bool flush);

  const std::shared_ptr<UcxContext> context_;
  const uint64_t localToken_;
  const bool initiator_;
  std::shared_ptr<PeerWatch> watch_;
  std::atomic<int> deliveries_{1}; // one is the open connection itself
  bool established_ = false;
  // The peer has had an answer to its handshake, or ours is over.
  bool peerMayThinkItOpen_ = false;
  bool flushes_ = false; // its endpoint, when it ends
  ucp_ep_h endpoint_ = nullptr;
  bool endpointFailed_ = false; // UCX has said so
  bool endpointCloses_ = false;
  Preamble peer_; // once it has introduced itself
  Transcript transcript_;
  std::unique_ptr<crypto::KeyExchange> keyExchange_; // until established
  std::unique_ptr<SecureChannel> channel_; // when encrypted
  std::string bulkSendKey_; // not empty when encrypted
  std::string bulkReceiveKey_;
  bool exposesMemory_ = false; // the peer may be able to read ours
  bool cmaUsable_ = false; // we can read the peer's
  Nearness nearness_; // of the peer, as both have proved it
  std::string whyNoCma_;
  std::deque<Unsent> unsent_;
  EarlyMessages early_;
  size_t earlyBytes_ = 0;
  Transfers transfers_;
  // Transfers of the peer that this end acknowledges with its next message.
  std::vector<uint64_t> acknowledgements_;
  // Transfers whose memory this end has mapped and still uses. The peer need
  // not hear of them before acknowledge().
  std::vector<uint64_t> adopted_;
  bool acknowledgesSoon_ = false;
  // Receives on the bulk channel, each with the peer's transfer.
  std::unordered_map<uint64_t, uint64_t> pulls_;
  // What waits for the verdict.
  std::vector<std::pair<base::Error, Callback>> unjudged_;
};

} // namespace torch_rpc_ext::transport::ucx
