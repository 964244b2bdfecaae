#pragma once

#include "base/log.h"
#include "base/timer.h"
#include "transport/transport.h"
#include "transport/ucx/abandoned_slots.h"
#include "transport/ucx/bulk_channel.h"
#include "transport/ucx/connection.h"
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
    return process_;
  }
  const std::string& workerAddress() const {
    return workerAddress_;
  }
  // Made at the first use: most groups never need it. Its port is taken before
  // where ports are few.
  base::Result<std::shared_ptr<BulkChannel>> bulk();
  // Under the lock: holds what a peer may still be reading although nobody can
  // tell when it ends, for as long as this context lives.
  void park(Callback callback) {
    parked_.push_back(std::move(callback));
  }
  // Under the lock: has the connection acknowledge() in a moment.
  void acknowledgeSoon(std::shared_ptr<UcxConnection> connection);
  // Under the lock: forgets a connection that has ended; `broken` is the same
  // one, where the peer may not know of it.
  void forget(
      uint64_t localToken,
      const std::shared_ptr<UcxConnection>& broken);
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
      const ucp_am_recv_param_t* param);
  void onMessage(base::ConstSpan header, base::ConstSpan data);
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
  void fetchBigFrame(
      const std::shared_ptr<UcxConnection>& connection,
      const FrameHeader& header,
      const std::vector<BulkEntry>& entries);
  void progressSoon();
  void acknowledgeNow();
  void expireOpening();
  std::shared_ptr<UcxConnection> find(uint64_t token) const;
  void onLateMessage(const FrameHeader& header);
  std::shared_ptr<UcxConnection> makeConnection(bool initiator);

  const Options options_;
  const std::shared_ptr<UcpContext> ucp_;
  const std::shared_ptr<Worker> control_;
  const std::string workerAddress_;
  const uint64_t doorToken_; // who does not know it cannot connect
  const uint64_t nonce_; // peers on this host read it to test CMA
  const ProcessIdentity process_;
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
  base::LimitedLog refusals_;
  // Connections that may still be opening, the oldest first.
  std::deque<
      std::pair<base::Timer::Clock::time_point, std::weak_ptr<UcxConnection>>>
      opening_;
  std::optional<base::Timer> openingTimer_;
  std::unordered_map<uint64_t, std::shared_ptr<UcxConnection>> connections_;
  size_t closing_ = 0;
  std::vector<Callback> parked_;
  std::vector<std::shared_ptr<UcxConnection>> acknowledging_;
  std::optional<base::Timer> acknowledgeTimer_;
};

} // namespace torch_rpc_ext::transport::ucx
