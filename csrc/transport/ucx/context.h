#pragma once

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
  Worker& worker() const {
    return *control_;
  }
  const std::shared_ptr<Worker>& sharedWorker() const {
    return control_;
  }
  base::Poller& poller() const {
    return *poller_;
  }
  base::TaskRunner& runner() const {
    return *runner_;
  }
  Handler& handler() const {
    return *handler_;
  }
  SharedMaps& maps() {
    return maps_;
  }
  // Under the lock; empty before there is a group.
  const std::string& groupKey() const {
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
  // Under the lock: has the connection's onDoubtOver() run in a while.
  void doubt(const std::shared_ptr<UcxConnection>& connection) {
    doubts_->add(connection);
  }
  // Under the lock: a connection has ended, and its peer may still be reading
  // memory of ours, which `watch` holds until it cannot.
  void keep(std::shared_ptr<PeerWatch> watch);
  // Under the lock: has the connection acknowledge() in a moment.
  void acknowledgeSoon(std::shared_ptr<UcxConnection> connection);
  // Under the lock: forgets a connection that has ended; `broken` is the same
  // one, where the peer may not know of it.
  void forget(
      uint64_t localToken,
      const std::shared_ptr<UcxConnection>& broken);
  // Under the lock: keeps the endpoint of a connection that has ended open, for
  // as long as the peer's process lives. UCX pairs the endpoints of two workers
  // in the order in which they are made, and not by connection: the peer may
  // send what belongs to another connection to this endpoint, and UCX drops,
  // in silence, messages in several parts to one that is closed. False once
  // this worker ends.
  bool park(std::shared_ptr<UcxConnection> connection);
  // Under the lock: closes it, if it is kept open.
  void unpark(const UcxConnection& connection);
  // Under the lock: tells the peer of a connection that broke here, once, and
  // unless it broke long ago.
  void tellThatItBroke(uint64_t localToken);
  // Maybe it died while it was writing to this worker.
  void peerLost() {
    slots_->lookSoon();
  }
  // Under the lock: endpoints that UCX has not yet closed.
  void endpointClosing() {
    ++closing_;
  }
  void endpointClosed() {
    --closing_;
  }

 private:
  UcxContext(
      Options options,
      std::shared_ptr<UcpContext> ucp,
      std::shared_ptr<Worker> control,
      std::shared_ptr<Worker> bulk);

  static ucs_status_t onActiveMessage(
      void* self,
      const void* header,
      size_t headerLength,
      void* data,
      size_t length,
      const ucp_am_recv_param_t* param) noexcept;
  void onMessage(base::ConstSpan header, base::ConstSpan data);
  void onLostMessage(
      base::ConstSpan header,
      base::ConstSpan data,
      const base::Error& error);
  void onFrameOf(
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  void onConnectionMessage(
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  void onOpen(const FrameHeader& header, base::ConstSpan data);
  void onHandshake(
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  void onFrame(
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  void onBigFrame(
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      base::ConstSpan data);
  // Any thread; ends the delivery.
  void deliver(
      const std::shared_ptr<UcxConnection>& connection,
      std::unique_ptr<Incoming> incoming);
  void fetchBigFrame(
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      const std::vector<BulkEntry>& entries);
  void progressSoon();
  void acknowledgeNow();
  std::shared_ptr<UcxConnection> find(uint64_t token) const;
  void onLateMessage(const FrameHeader& header);
  std::shared_ptr<UcxConnection> makeConnection(bool initiator);

  const Options options_;
  const std::shared_ptr<UcpContext> ucp_;
  const std::shared_ptr<Worker> control_;
  const WorkerAddress workerAddress_;
  const uint64_t doorToken_; // who does not know it cannot connect
  const HostMark mark_;
  SharedMaps maps_;
  base::Poller* poller_ = nullptr;
  base::TaskRunner* runner_ = nullptr;
  Handler* handler_ = nullptr;
  std::atomic<bool> stopped_{false};
  std::optional<AbandonedSlots> slots_; // once started

  std::mutex bulkMutex_;
  std::shared_ptr<Worker> bulkWorker_; // until there is a channel
  std::shared_ptr<BulkChannel> bulk_;

  // Under the control worker's lock.
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
