#pragma once

#include "base/gate.h"
#include "base/log.h"
#include "base/timer.h"
#include "transport/transport.h"
#include "transport/ucx/abandoned_slots.h"
#include "transport/ucx/bulk_channel.h"
#include "transport/ucx/connection.h"
#include "transport/ucx/deadlines.h"
#include "transport/ucx/options.h"
#include "transport/ucx/shared_maps.h"
#include "transport/ucx/worker.h"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// The UCX transport. Control messages use one UCX worker. The receiver moves
// bulk by reading the sender's memory or, where that is not possible, over a
// second worker.
//
// Owns: the UCX context, both workers, all connections.
// Thread: any.
class UcxContext final : public Context,
                         public std::enable_shared_from_this<UcxContext> {
 public:
  static base::Result<std::shared_ptr<UcxContext>> create(const Options&);
  ~UcxContext() override;

  std::string address() const override;
  void start(base::Poller& poller, base::TaskRunner& runner, Handler& handler)
      override;
  ConnectionPtr connect(const std::string& address, const std::string& hello)
      override;
  void setSecret(const std::string& secret) override;
  bool trim(std::chrono::steady_clock::duration age) override {
    return maps_.trim(age) != 0;
  }
  void stop() override;

  // ---- for UcxConnection ----
  const Options& options() const {
    return options_;
  }
  ControlWorker& worker() const {
    return *control_;
  }
  const std::shared_ptr<ControlWorker>& sharedWorker() const {
    return control_;
  }
  base::Poller& poller() const {
    return *poller_;
  }
  base::TaskRunner& runner() const {
    return *runner_;
  }
  // Runs `use`, a void(Handler&), unless stop() is about to return or has
  // returned. There is no other way to the Handler, so stop() can wait for all
  // threads that are inside of `use`.
  template <typename F>
  void withHandler(F&& use) {
    const base::Gate::Inside inside(*gate_);
    if (inside.counted()) {
      use(*handler_);
    }
  }
  // To be called when the Handler has heard of the end of a connection.
  void connectionTold() {
    untold_.fetch_sub(1);
  }
  SharedMaps& maps() {
    return maps_;
  }
  // The key of the group's proofs. Empty before setSecret().
  const std::string& groupKey(Locked&) const {
    return groupKey_;
  }
  const ProcessIdentity& process() const {
    return mark_.identity();
  }
  const WorkerAddress& workerAddress() const {
    return workerAddress_;
  }
  // The channel is made at its first use, because most groups never need it.
  // Only if the ports are limited, its worker is made with the context.
  base::Result<std::shared_ptr<BulkChannel>> bulk();
  // Calls the connection's onDoubtOver() after kDoubtTime.
  void doubt(Locked& locked, const std::shared_ptr<UcxConnection>& connection) {
    doubts_->add(locked, connection);
  }
  // To be called when a connection has ended and its peer may still be reading
  // memory of this process. `watch` holds that memory until the peer cannot
  // read any more, and this context keeps `watch`.
  void keep(Locked& locked, std::shared_ptr<PeerWatch> watch);
  // Calls the connection's acknowledge() after kAcknowledgeAfter.
  void acknowledgeSoon(
      Locked& locked,
      std::shared_ptr<UcxConnection> connection);
  // Forgets a connection that has ended. `broken` is the same connection if it
  // broke and the peer may not know that, else null.
  void forget(
      Locked& locked,
      uint64_t localToken,
      const std::shared_ptr<UcxConnection>& broken);
  // Keeps the endpoint of a connection that has ended open until UCX finds it
  // broken, the peer's process is seen to end, or kMaxParked newer connections
  // are kept. UCX pairs the endpoints of two workers in the order in which they
  // are made, not by connection: so the peer may send messages of another
  // connection to this endpoint, and if the endpoint is closed, UCX drops
  // messages of several parts without a word. False once this worker stops.
  bool park(Locked& locked, std::shared_ptr<UcxConnection> connection);
  // Closes the connection's endpoint, if park() keeps it open.
  void unpark(Locked& locked, const UcxConnection& connection);
  // Tells the peer that the connection broke at this end, unless the peer has
  // been told already, or kMaxBroken other connections have broken since.
  void tellThatItBroke(Locked& locked, uint64_t localToken);
  // A peer is lost. Maybe it died while it was writing into the shared memory
  // of this worker.
  void peerLost() {
    slots_->lookSoon();
  }
  // Count the endpoints that UCX is closing; stop() waits for them.
  void endpointClosing(Locked&) {
    ++closing_;
  }
  void endpointClosed(Locked&) {
    --closing_;
  }

 private:
  UcxContext(
      Options options,
      std::shared_ptr<UcpContext> ucp,
      std::shared_ptr<base::Gate> gate,
      std::shared_ptr<ControlWorker> control,
      std::shared_ptr<BulkWorker> bulk);

  void onMessage(Locked& locked, base::ConstSpan header, base::ConstSpan data);
  // For a message that onMessage() could not handle, because of an exception.
  void onLostMessage(
      Locked& locked,
      base::ConstSpan header,
      base::ConstSpan data,
      const base::Error& error);
  void onFrameOf(
      Locked& locked,
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  void onConnectionMessage(
      Locked& locked,
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  void onOpen(Locked& locked, const FrameHeader& header, base::ConstSpan data);
  void onHandshake(
      Locked& locked,
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  void onFrame(
      Locked& locked,
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  void onBigFrame(
      Locked& locked,
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  // Calls Handler::onFrame(), and then the connection's deliveryEnds().
  void deliver(
      const std::shared_ptr<UcxConnection>& connection,
      std::unique_ptr<Incoming> incoming);
  void fetchBigFrame(
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      const std::vector<BulkEntry>& entries);
  void progressSoon();
  void waitUntilTold();
  void acknowledgeNow(Locked& locked);
  std::shared_ptr<UcxConnection> find(Locked& locked, uint64_t token) const;
  // For a message of a connection that has ended here, or of a stranger.
  void onLateMessage(Locked& locked, const FrameHeader& header);
  std::shared_ptr<UcxConnection> makeConnection(Locked& locked, bool initiator);

  const Options options_;
  const std::shared_ptr<UcpContext> ucp_;
  // Entered for Handler methods, and for all that both workers call.
  const std::shared_ptr<base::Gate> gate_;
  const std::shared_ptr<ControlWorker> control_;
  const WorkerAddress workerAddress_;
  const uint64_t doorToken_; // peers must know it to connect
  const HostMark mark_;
  SharedMaps maps_;
  base::Poller* poller_ = nullptr;
  base::TaskRunner* runner_ = nullptr;
  Handler* handler_ = nullptr;
  std::atomic<bool> stopped_{false};
  // How many connections there are of whose end the Handler has not heard.
  std::atomic<size_t> untold_{0};
  std::optional<AbandonedSlots> slots_; // set by start()

  std::mutex bulkMutex_;
  std::shared_ptr<BulkWorker> bulkWorker_; // until bulk_ has it
  std::shared_ptr<BulkChannel> bulk_;

  std::string groupKey_;
  // The connections that broke last and whose peers have not been told, by
  // token, the oldest first. UCX does not tell a peer that this end is closed:
  // the peer could go on sending.
  std::deque<std::pair<uint64_t, std::shared_ptr<UcxConnection>>> broken_;
  // The connections whose endpoints park() keeps open, the oldest first.
  std::deque<std::shared_ptr<UcxConnection>> parked_;
  base::LimitedLog refusals_;
  // Set by start(): the deadlines of connections that are opening, and of
  // doubted connections, whose peers' processes may soon be seen to end.
  std::optional<Deadlines<UcxConnection>> openings_;
  std::optional<Deadlines<UcxConnection>> doubts_;
  std::unordered_map<uint64_t, std::shared_ptr<UcxConnection>> connections_;
  size_t closing_ = 0;
  // The watches of connections that have ended, see keep().
  std::vector<std::shared_ptr<PeerWatch>> watches_;
  std::vector<std::shared_ptr<UcxConnection>> acknowledging_;
  std::optional<base::Timer> acknowledgeTimer_;
};

} // namespace torch_rpc_ext::transport::ucx
