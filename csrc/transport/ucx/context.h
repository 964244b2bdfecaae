#pragma once

#include "base/gate.h"
#include "base/log.h"
#include "transport/transport.h"
#include "transport/ucx/abandoned_slots.h"
#include "transport/ucx/bulk/resources.h"
#include "transport/ucx/closing_endpoints.h"
#include "transport/ucx/connection.h"
#include "transport/ucx/deadlines.h"
#include "transport/ucx/ended_connections.h"
#include "transport/ucx/handshake_session.h"
#include "transport/ucx/host_proof.h"
#include "transport/ucx/options.h"
#include "transport/ucx/watched_processes.h"
#include "transport/ucx/worker.h"

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

namespace torch_rpc_ext::transport::ucx {

// The UCX transport. Control messages use one UCX worker. Bulk travels in one
// of the ways of bulk/way.h.
//
// Owns: the UCX context, both workers, all connections.
// Thread: any.
class UcxContext final : public Context,
                         public std::enable_shared_from_this<UcxContext> {
 public:
  static base::Result<std::shared_ptr<UcxContext>> create(const Options&);

  std::string address() const override;
  void start(base::Poller& poller, base::TaskRunner& runner, Handler& handler)
      override;
  ConnectionPtr connect(const std::string& address, const std::string& hello)
      override;
  void setSecret(const std::string& secret) override;
  bool trim(std::chrono::steady_clock::duration age) override {
    return bulk_.maps().trim(age) != 0;
  }
  void stop() override;

  // ---- for UcxConnection ----

  const Options& options() const {
    return options_;
  }
  ControlWorker& worker() const {
    return *control_;
  }
  const ProcessIdentity& process() const {
    return mark_.identity();
  }
  // What this end says of itself in the handshake of the connection
  // `localToken`.
  HandshakeSession::Self self(Locked&, uint64_t localToken) const {
    return {
        groupKey_, options_.encryption, localToken, process(), workerAddress_};
  }
  bulk::Resources& bulk() {
    return bulk_;
  }
  EndedConnections& ended() {
    return ended_;
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
  // Logs that a message, or a peer, was refused.
  void refused(const std::string& text) {
    refusals_(base::LogLevel::kWarning, text);
  }
  // To be called when the Handler has heard of the end of a connection.
  void connectionTold() {
    untold_.fetch_sub(1);
  }
  // Calls the connection's onDoubtOver() after kDoubtTime.
  void doubt(Locked& locked, const std::shared_ptr<UcxConnection>& connection) {
    doubts_->add(locked, connection);
  }
  // Calls the connection's acknowledge() after kAcknowledgeAfter.
  void acknowledgeSoon(
      Locked& locked,
      const std::shared_ptr<UcxConnection>& connection) {
    acknowledgements_->add(locked, connection);
  }
  // The process, to notice its end. Null if there is no such process, or if it
  // cannot be watched (WatchedProcesses::open()).
  std::shared_ptr<WatchedProcess> processWithPid(Locked& locked, int32_t pid) {
    return processes_.open(locked, control_, *poller_, pid);
  }
  // Forgets a connection that has ended.
  void forget(Locked&, uint64_t localToken) {
    connections_.erase(localToken);
  }
  // A peer is lost. Maybe it died while it was writing into the shared memory
  // of this worker.
  void peerLost() {
    slots_->lookSoon();
  }
  // Count the handshakes under way that peers have begun; see kMaxAccepting.
  void acceptBegins(Locked&) {
    ++accepting_;
  }
  void acceptEnds(Locked&) {
    --accepting_;
  }
  ClosingEndpoints& closing() {
    return closing_;
  }

 private:
  UcxContext(
      Options options,
      std::shared_ptr<base::Gate> gate,
      std::shared_ptr<ControlWorker> control,
      bulk::MakeWorker makeBulkWorker);

  void onMessage(Locked& locked, base::ConstSpan header, base::ConstSpan data);
  // For a message that onMessage() could not handle, because of an exception.
  void onLostMessage(
      Locked& locked,
      base::ConstSpan header,
      base::ConstSpan data,
      const base::Error& error);
  void onOpen(Locked& locked, const Message& message);
  std::shared_ptr<UcxConnection> find(Locked& locked, uint64_t token) const;
  std::shared_ptr<UcxConnection> makeConnection(Locked& locked);
  void waitUntilTold();

  const Options options_;
  // Entered for Handler methods, and for all that both workers call.
  const std::shared_ptr<base::Gate> gate_;
  const std::shared_ptr<ControlWorker> control_;
  const WorkerAddress workerAddress_;
  const uint64_t doorToken_; // peers must know it to connect
  const HostMark mark_;
  bulk::Resources bulk_;
  EndedConnections ended_;
  base::Poller* poller_ = nullptr;
  Handler* handler_ = nullptr;
  std::atomic<bool> stopped_{false};
  // How many connections there are of whose end the Handler has not heard.
  std::atomic<size_t> untold_{0};
  std::optional<AbandonedSlots> slots_; // set by start()
  std::string groupKey_; // of the proofs; empty before setSecret()
  base::LimitedLog refusals_;
  // Set by start(): the deadlines of connections that are opening, of doubted
  // connections, whose peers' processes may soon be seen to end, and of
  // connections that have something to acknowledge.
  std::optional<Deadlines<UcxConnection>> openings_;
  std::optional<Deadlines<UcxConnection>> doubts_;
  std::optional<Deadlines<UcxConnection>> acknowledgements_;
  std::unordered_map<uint64_t, std::shared_ptr<UcxConnection>> connections_;
  WatchedProcesses processes_;
  size_t accepting_ = 0;
  ClosingEndpoints closing_; // stop() waits for them
};

} // namespace torch_rpc_ext::transport::ucx
