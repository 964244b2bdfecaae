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

// The UCX transport: control on one UCX worker, bulk by reading the peer's
// memory or on a second worker.
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
  // Runs `use`, a void(Handler&), unless stop() is about to return or has. The
  // only way to the Handler: stop() waits for who is in here.
  template <typename F>
  void withHandler(F&& use) {
    const base::Gate::Inside inside(*gate_);
    if (inside.counted()) {
      use(*handler_);
    }
  }
  // The Handler has had the last word about a connection.
  void connectionTold() {
    untold_.fetch_sub(1);
  }
  SharedMaps& maps() {
    return maps_;
  }
  // Empty before there is a group.
  const std::string& groupKey(Locked&) const {
    return groupKey_;
  }
  const ProcessIdentity& process() const {
    return mark_.identity();
  }
  const WorkerAddress& workerAddress() const {
    return workerAddress_;
  }
  // Made at the first use: most groups never need it. Its port is taken before
  // where ports are few.
  base::Result<std::shared_ptr<BulkChannel>> bulk();
  // Has the connection's onDoubtOver() run in a while.
  void doubt(Locked& locked, const std::shared_ptr<UcxConnection>& connection) {
    doubts_->add(locked, connection);
  }
  // A connection has ended, and its peer may still be reading memory of ours,
  // which `watch` holds until it cannot.
  void keep(Locked& locked, std::shared_ptr<PeerWatch> watch);
  // Has the connection acknowledge() in a moment.
  void acknowledgeSoon(
      Locked& locked,
      std::shared_ptr<UcxConnection> connection);
  // Forgets a connection that has ended; `broken` is the same one, where the
  // peer may not know of it.
  void forget(
      Locked& locked,
      uint64_t localToken,
      const std::shared_ptr<UcxConnection>& broken);
  // Keeps the endpoint of a connection that has ended open, for as long as the
  // peer's process lives. UCX pairs the endpoints of two workers in the order
  // in which they are made, and not by connection: the peer may send what
  // belongs to another connection to this endpoint, and UCX drops, in silence,
  // messages in several parts to one that is closed. False once this worker
  // ends.
  bool park(Locked& locked, std::shared_ptr<UcxConnection> connection);
  // Closes it, if it is kept open.
  void unpark(Locked& locked, const UcxConnection& connection);
  // Tells the peer of a connection that broke here, once, and unless it broke
  // long ago.
  void tellThatItBroke(Locked& locked, uint64_t localToken);
  // Maybe it died while it was writing to this worker.
  void peerLost() {
    slots_->lookSoon();
  }
  // Endpoints that UCX has not yet closed.
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
  // What took it has thrown.
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
  // Ends the delivery.
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
  // Of a connection that has ended here, or a stranger's.
  void onLateMessage(Locked& locked, const FrameHeader& header);
  std::shared_ptr<UcxConnection> makeConnection(Locked& locked, bool initiator);

  const Options options_;
  const std::shared_ptr<UcpContext> ucp_;
  // Around Handler methods, and what both workers call.
  const std::shared_ptr<base::Gate> gate_;
  const std::shared_ptr<ControlWorker> control_;
  const WorkerAddress workerAddress_;
  const uint64_t doorToken_; // who does not know it cannot connect
  const HostMark mark_;
  SharedMaps maps_;
  base::Poller* poller_ = nullptr;
  base::TaskRunner* runner_ = nullptr;
  Handler* handler_ = nullptr;
  std::atomic<bool> stopped_{false};
  // Connections of whose end the Handler has not heard.
  std::atomic<size_t> untold_{0};
  std::optional<AbandonedSlots> slots_; // once started

  std::mutex bulkMutex_;
  std::shared_ptr<BulkWorker> bulkWorker_; // until there is a channel
  std::shared_ptr<BulkChannel> bulk_;

  std::string groupKey_;
  // Those that broke last and whose peers were not told, the oldest first: UCX
  // lets the peer go on sending on what is closed here.
  std::deque<std::pair<uint64_t, std::shared_ptr<UcxConnection>>> broken_;
  // Those whose endpoints are kept open, the oldest first.
  std::deque<std::shared_ptr<UcxConnection>> parked_;
  base::LimitedLog refusals_;
  // Once started: of connections that open, and of those whose peers' processes
  // have yet to be seen to end.
  std::optional<Deadlines<UcxConnection>> openings_;
  std::optional<Deadlines<UcxConnection>> doubts_;
  std::unordered_map<uint64_t, std::shared_ptr<UcxConnection>> connections_;
  size_t closing_ = 0;
  // Of connections that have ended.
  std::vector<std::shared_ptr<PeerWatch>> watches_;
  std::vector<std::shared_ptr<UcxConnection>> acknowledging_;
  std::optional<base::Timer> acknowledgeTimer_;
};

} // namespace torch_rpc_ext::transport::ucx
