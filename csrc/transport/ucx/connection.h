#pragma once

#include "transport/transport.h"
#include "transport/ucx/bulk/exchange.h"
#include "transport/ucx/handshake_session.h"
#include "transport/ucx/peer_watch.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

class UcxContext;

// One UCX endpoint and all that is under way on it.
//
// Owns: the endpoint, unsent frames, the handshake until it is over, and from
//   then on the bulk.
// Thread: any.
// Outlives: nothing; a shared_ptr of UcxContext, or of the operation that
//   closes the endpoint, keeps it until the endpoint is closed.
class UcxConnection final : public Connection,
                            private bulk::Link,
                            public std::enable_shared_from_this<UcxConnection> {
 public:
  static std::shared_ptr<UcxConnection> create(
      std::shared_ptr<UcxContext> context,
      uint64_t localToken);

  void send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback)
      override;
  void close() override;
  void lose(const base::Error& why) override;
  void probe() override;
  PeerState peer() const override {
    return watch_->state();
  }
  Distance distance() const override;
  PathInfo path() const override;
  ControlWorker& worker() const override;

  // ---- for UcxContext ----

  // This end opens the connection. If that fails, the connection ends.
  void
  open(Locked& locked, const ContextAddress& peer, const std::string& hello);
  // The peer opens the connection. If that fails, the peer is refused.
  void accept(
      Locked& locked,
      HandshakeSession::Opening opening,
      const std::string& hello);
  // A message under this connection's token.
  void onMessage(Locked& locked, const Message& message);
  // The time for the handshake is over.
  void onHandshakeLate(Locked& locked);
  // The time is over in which the peer's process could have been seen to end.
  void onDoubtOver(Locked& locked);
  // Sends the acknowledgements that bulk::Exchange::done() has put off.
  void acknowledge(Locked& locked);
  // Whether the peer may still be reading memory of this process.
  bool lends(Locked& locked) const {
    return bulk_ != nullptr && bulk_->pending(locked);
  }
  void closeNow(Locked& locked);
  // Closes an endpoint of this connection. What UCX has not sent is dropped.
  void closeByForce(Locked& locked, ucp_ep_h endpoint);
  // Ends the connection with `error`, by this worker's choice. With `flush`,
  // sent messages leave first.
  void fail(Locked& locked, base::Error error, bool flush = false);

  // ---- for EndedConnections ----

  // Tells the peer that the connection broke at this end, because the peer may
  // go on sending. If the peer was told before, over an endpoint that still
  // works, the peer is told again only when that endpoint fails.
  void tellThatItBroke(Locked& locked);
  // Whether a message for this connection, which has ended, is the peer's word
  // that the peer has closed the connection too.
  bool saysClosed(Locked& locked, const Message& message);
  // Closes the endpoint that was kept open, see EndedConnections::park().
  void leavePark(Locked& locked);

 private:
  struct ActiveSend;
  class Delivery;
  struct Closing;
  struct Flushing;
  struct Unsent {
    base::Buffer head;
    std::vector<BulkSpan> bulk;
    Callback callback;
  };

  UcxConnection(std::shared_ptr<UcxContext> context, uint64_t localToken);

  bool isOpen() const {
    return peer() == PeerState::kOpen;
  }
  // Passes news about the peer to the PeerWatch. If the news ends the
  // connection, all memory is released that the peer cannot read any more, and
  // the Handler is told of the end once it has seen all frames.
  void hear(Locked& locked, PeerWord word, base::Error why = {}) {
    watch_->hear(locked, word, std::move(why));
  }

  // ---- sending (connection.cpp) ----

  void sendOrKeep(Locked& locked, Unsent& frame);
  void sendNow(Locked& locked, Unsent frame);
  void sendActive(Locked& locked, FrameHeader header, base::Buffer data);
  // UCX has finished the send of a message; `status` says whether it left.
  void onSent(Locked& locked, ucs_status_t status);
  static void deferEnd(Locked& locked, Unsent frame, const base::Error& error);
  // The same for a frame that was kept until the connection is open.
  static void deferUnsent(Locked& locked, Unsent frame, base::Error error);
  static void
  deferCallback(Locked& locked, Callback callback, base::Error error);

  // ---- bulk::Link ----

  std::shared_ptr<void> keep() override {
    return shared_from_this();
  }
  std::chrono::steady_clock::duration silence(Locked&) const override {
    return std::chrono::steady_clock::now() - heard_;
  }
  const base::Error& ending() const override {
    return watch_->why();
  }
  void tell(Locked& locked, FrameHeader header, base::Buffer data) override;
  void giveUp(Locked& locked, base::Error why) override {
    fail(locked, std::move(why));
  }
  void acknowledgeSoon(Locked& locked) override;
  void whenJudged(base::Error error, Callback callback) override;

  // ---- the beginning (connection_handshake.cpp) ----

  Nearness meet(Locked& locked, const ProcessIdentity& peer);
  // For bulk::Peer::reachesUsAt.
  std::vector<std::string> addressesForPeer(Locked& locked) const;
  base::Error openEndpoint(
      Locked& locked,
      const WorkerAddress& address,
      const Nearness& nearness);
  void onHandshake(Locked& locked, const Message& message);
  base::Error onAnswer(Locked& locked, base::ConstSpan data);
  base::Error onConfirmation(Locked& locked, base::ConstSpan data);
  void agree(Locked& locked);
  void establish(Locked& locked);
  void sendRefusal(Locked& locked, uint64_t token, const base::Error& why);

  // ---- messages that arrive (connection_messages.cpp) ----

  void keepEarly(Locked& locked, const Message& message);
  void onSealedOrPlain(Locked& locked, const Message& message);
  void onPlain(Locked& locked, const Message& message);
  void onFrame(Locked& locked, const Message& message);
  void onBigFrame(Locked& locked, const Message& message);
  void fetchBigFrame(
      const std::shared_ptr<Delivery>& delivery,
      const FrameHeader& header,
      const std::vector<BulkEntry>& entries,
      std::shared_ptr<void> ahead);
  // Calls Handler::onFrame().
  void deliver(std::unique_ptr<Incoming> incoming);
  // Runs `carry`, a void() that carries a frame to the Handler. An exception
  // fails the connection.
  template <typename F>
  void guardDelivery(F&& carry);
  // To be called after each delivery, and once at the end of the connection.
  // The last call tells the Handler of the end, so that the Handler hears of it
  // after all frames: while one thread sees the end, others may still carry
  // frames to the Handler.
  void deliveryEnds();

  // ---- the end (connection_ending.cpp) ----

  // UCX's error handler: the endpoint does not work any more.
  void onPathLost(Locked& locked, ucp_ep_h endpoint, ucs_status_t status);
  void onPeerChanged(Locked& locked, PeerState before);
  void end(Locked& locked);
  void closeEndpoint(Locked& locked, bool flush);
  // False if nothing is left to be sent, or nothing can be.
  bool beginFlush(Locked& locked, ucp_ep_h endpoint);

  const std::shared_ptr<UcxContext> context_;
  const uint64_t localToken_;
  std::shared_ptr<PeerWatch> watch_;
  std::atomic<int> deliveries_{1}; // those under way, plus 1 until end()
  std::chrono::steady_clock::time_point heard_; // of the last message
  ucp_ep_h endpoint_ = nullptr;
  bool endpointFailed_ = false; // UCX's error handler has run
  bool endpointCloses_ = false;
  bool isAccepting_ = false; // the peer has begun the handshake, which goes on
  // The connection has ended, and the peer was told so over the endpoint.
  bool toldOfEnd_ = false;
  // The peer still sends messages, so it is to be told once more when the
  // endpoint is closed.
  bool tellsAgain_ = false;
  // The peer may take the connection for open: this end has answered the peer's
  // handshake, or has finished the handshake that it began.
  bool peerMayThinkItOpen_ = false;
  bool flushes_ = false; // sent messages leave before the endpoint closes
  std::optional<HandshakeSession> session_; // while it is needed
  Agreement agreed_; // complete once the peer may take the connection for open
  // Null until the handshake is over. Written before the state says kOpen, so
  // who has seen that state needs no lock to use it.
  std::unique_ptr<bulk::Exchange> bulk_;
  std::deque<Unsent> unsent_;
  // Messages that have overtaken the end of the handshake, in the order in
  // which they came.
  std::vector<std::pair<FrameHeader, base::Buffer>> early_;
  size_t earlyBytes_ = 0;
  // Callbacks that wait for the verdict about the peer, see whenJudged().
  std::vector<std::pair<base::Error, Callback>> unjudged_;
};

} // namespace torch_rpc_ext::transport::ucx
