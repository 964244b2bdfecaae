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

// One UCX endpoint and all that is under way on it.
//
// Owns: the endpoint, unsent frames, bulk that the peer has not yet taken.
// Thread: any.
// Outlives: nothing; a shared_ptr of UcxContext, or of the operation that
//   closes the endpoint, keeps it until the endpoint is closed.
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

  // Moves the peer's bulk spans [first, first + into.size()) of `transfer` into
  // `into`, in the fastest way that works. `arrived` as in Incoming::receive().
  void fetch(
      uint64_t transfer,
      uint32_t first,
      const std::vector<BulkEntry>& from,
      const std::vector<base::MutableSpan>& into,
      Callback callback,
      Incoming::Arrived arrived);
  // Tells the peer that the memory of `transfer`, `bytes` in all, is the peer's
  // own again. The peer hears this at once after an error or if `bytes` is
  // large, else a little later, together with other messages.
  void done(uint64_t transfer, uint64_t bytes, const base::Error& error);
  // Whether map() may succeed.
  bool maps(const BulkEntry& entry) const;
  // The peer's shared memory itself, mapped here; null if the entry has no
  // shared memory, or if this process cannot map it.
  std::shared_ptr<memory::SharedMap> map(const BulkEntry& entry);
  // Our own shared memory, which the peer gives back; null if the peer has no
  // such memory of ours.
  std::shared_ptr<memory::SharedMap> takeBack(const BulkEntry& entry);

  // Calls `callback` with `error`. If `error` is kPeerLost and the peer's
  // process is watched, this first waits for the verdict about the peer. If the
  // connection is over, `callback` gets ending() instead, which says what has
  // become of the peer.
  void whenJudged(base::Error error, Callback callback);
  // Why the connection is over; to be called once it is over.
  const base::Error& ending() const {
    return watch_->why();
  }

  // To be called before and after the delivery of each frame. A thread may
  // still carry a frame to the Handler while another thread sees the end of the
  // connection. The last deliveryEnds() tells the Handler of the end.
  void deliveryBegins() {
    deliveries_.fetch_add(1);
  }
  void deliveryEnds();
  bool initiator() const {
    return initiator_;
  }
  ControlWorker& worker() const;

  // The handshake, in the order of its messages. This end opens the connection:
  base::Error
  open(Locked& locked, const ContextAddress& peer, const std::string& hello);
  // The peer has opened the connection, with a valid proof:
  base::Error accept(
      Locked& locked,
      uint64_t door,
      std::string opener,
      Preamble peer,
      const std::string& hello);
  // The peer has accepted the connection that this end opened. If this
  // succeeds, frames flow:
  base::Error onAccepted(Locked& locked, const Signed& accepter);
  // The peer has confirmed the connection that this end accepted. If this
  // succeeds, frames flow:
  base::Error onConfirm(Locked& locked, base::ConstSpan proof);
  void sendRefusal(Locked& locked, uint64_t token, const std::string& why);
  // Tells the peer that the connection broke at this end, because the peer may
  // go on sending. Returns false if there is no way to tell the peer.
  bool tellThatItBroke(Locked& locked);
  // Closes the endpoint that was kept open, see UcxContext::park().
  void leavePark(Locked& locked);
  // The message inside of a kSealed message.
  base::Result<SecureChannel::Opened>
  unseal(Locked& locked, const FrameHeader& header, base::ConstSpan data);
  bool encrypted(Locked&) const {
    return channel_ != nullptr;
  }
  // Messages that have overtaken the end of the handshake, in the order in
  // which they came.
  using EarlyMessages = std::vector<std::pair<FrameHeader, base::Buffer>>;
  void
  keepEarly(Locked& locked, const FrameHeader& header, base::ConstSpan data);
  EarlyMessages takeEarly(Locked&) {
    return std::move(early_);
  }
  void onPull(Locked& locked, uint64_t transfer, base::ConstSpan data);
  void onDone(Locked& locked, uint64_t transfer, base::Error error);
  // The peer does not send bulk that this end has asked for.
  void onAbort(Locked& locked, uint64_t transfer, const base::Error& why);
  // Passes news about the peer to the PeerWatch. If the news ends the
  // connection, all memory is released that the peer cannot read any more, and
  // the Handler is told of the end once it has seen all frames.
  void hear(Locked& locked, PeerWord word, base::Error why = {}) {
    watch_->hear(locked, word, std::move(why));
  }
  void closeNow(Locked& locked);
  // Ends the connection with `error`, by this worker's choice. With `flush`,
  // sent messages leave first.
  void fail(Locked& locked, base::Error error, bool flush = false);
  // UCX's error handler: the endpoint does not work any more.
  void onPathLost(Locked& locked, ucp_ep_h endpoint, ucs_status_t status);
  // The time is over in which the peer's process could have been seen to end.
  void onDoubtOver(Locked& locked);
  // UCX has finished the send of a message; `status` says whether it left.
  void onSent(Locked& locked, ucs_status_t status);
  // Sends the acknowledgements that done() has put off.
  void acknowledge(Locked& locked);

  // The handshake is over, so the peer is known.
  bool established(Locked&) const {
    return established_;
  }
  // Whether the peer may still be reading memory of this process.
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
  std::atomic<int> deliveries_{1}; // those under way, plus 1 until end()
  bool established_ = false;
  // The peer may take the connection for open: this end has answered the peer's
  // handshake, or has finished the handshake that it began.
  bool peerMayThinkItOpen_ = false;
  bool flushes_ = false; // sent messages leave before the endpoint closes
  ucp_ep_h endpoint_ = nullptr;
  bool endpointFailed_ = false; // UCX's error handler has run
  bool endpointCloses_ = false;
  Preamble peer_; // complete once the peer has introduced itself
  Transcript transcript_;
  // Null once the keys are agreed on.
  std::unique_ptr<crypto::KeyExchange> keyExchange_;
  std::unique_ptr<SecureChannel> channel_; // null without encryption
  std::string bulkSendKey_; // both keys: empty without encryption
  std::string bulkReceiveKey_;
  bool exposesMemory_ = false; // the peer may be able to read our memory
  bool cmaUsable_ = false; // this process can read the peer's memory
  Nearness nearness_; // of the peer, as far as both ends have proved
  std::string whyNoCma_;
  std::deque<Unsent> unsent_;
  EarlyMessages early_;
  size_t earlyBytes_ = 0;
  Transfers transfers_;
  // Transfers of the peer that this end will acknowledge, one with each
  // message.
  std::vector<uint64_t> acknowledgements_;
  // Transfers whose memory this end has mapped and still uses. The peer is told
  // of them by acknowledge(), and not earlier.
  std::vector<uint64_t> adopted_;
  bool acknowledgesSoon_ = false;
  // The ids of receives on the bulk channel, each with the peer's transfer.
  std::unordered_map<uint64_t, uint64_t> pulls_;
  // Callbacks that wait for the verdict about the peer, see whenJudged().
  std::vector<std::pair<base::Error, Callback>> unjudged_;
};

} // namespace torch_rpc_ext::transport::ucx
