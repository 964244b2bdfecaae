#pragma once

#include "agent/admission.h"
#include "agent/agent_options.h"
#include "agent/barrier.h"
#include "agent/codec.h"
#include "agent/creations.h"
#include "agent/device/event_waiter.h"
#include "agent/device/ipc.h"
#include "agent/device/launcher.h"
#include "agent/device/same_process.h"
#include "agent/device/tables.h"
#include "agent/executor.h"
#include "agent/lender.h"
#include "agent/load_limits.h"
#include "agent/lost_callers.h"
#include "agent/membership.h"
#include "agent/peers.h"
#include "agent/pending_calls.h"
#include "agent/queued_frames.h"
#include "agent/running_requests.h"
#include "agent/worker_events.h"
#include "memory/buffer_cache.h"
#include "metrics/call_log.h"
#include "metrics/counters.h"
#include "transport/transport.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_impl.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

// Message types of our own, beside upstream's: they say who is ready to end.
inline constexpr uint16_t kBarrierRequestType =
    0x70 | rpc::MessageTypeFlags::REQUEST_TYPE;
inline constexpr uint16_t kBarrierResponseType =
    0x70 | rpc::MessageTypeFlags::RESPONSE_TYPE;
// And about CUDA IPC: this one and the next two are device::IpcMessage. They
// have no answer.
inline constexpr uint16_t kIpcType = 0x71 | rpc::MessageTypeFlags::REQUEST_TYPE;
constexpr bool isIpcType(uint16_t type) {
  return type >= kIpcType && type <= kIpcType + 2;
}

// torch's RpcAgent over a transport. Wires the parts and holds no protocol of
// its own: Membership knows who is there, Peers how to reach them, PendingCalls
// what is under way, Executor runs what arrives, the codec turns messages into
// frames.
//
// Owns: all of them.
// Thread: any.
// Outlives: the transport's callbacks; shutdown() ends them.
class UcxAgent final : public rpc::RpcAgent, private transport::Handler {
 public:
  using RRefs = std::vector<c10::intrusive_ptr<rpc::RRef>>;

  UcxAgent(
      AgentOptions options,
      const std::string& name,
      rpc::worker_id_t id,
      bool isStaticGroup,
      std::unique_ptr<rpc::RequestCallback> callback);
  ~UcxAgent() override;

  // ---- rpc::RpcAgent ----
  c10::intrusive_ptr<rpc::JitFuture> send(
      const rpc::WorkerInfo& to,
      c10::intrusive_ptr<rpc::Message> message,
      float rpcTimeoutSeconds = rpc::kUnsetRpcTimeout,
      const rpc::DeviceMap& deviceMap = {}) override;
  // Blocks until no worker of a static group has calls under way. `timeout` in
  // seconds; 0 waits for ever.
  void join(bool shutdown = false, float timeout = 0) override;
  void sync() override {}
  void startImpl() override;
  void shutdownImpl() override;
  // In a forked child, where the agent's threads do not exist and its UCX
  // belongs to the parent: nothing is sent any more, RRefs that end there
  // included.
  void abandon() {
    rpcAgentRunning_.store(false);
  }
  const rpc::WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const rpc::WorkerInfo& getWorkerInfo(rpc::worker_id_t id) const override;
  std::vector<rpc::WorkerInfo> getWorkerInfos() const override;
  using rpc::RpcAgent::getWorkerInfo;
  std::unordered_map<std::string, std::string> getMetrics() override;
  std::unordered_map<std::string, std::string> getDebugInfo() override;
  rpc::DeviceMap getDeviceMap(const rpc::WorkerInfo& to) const override;
  const std::vector<c10::Device>& getDevices() const override;
  void addGilWaitTime(std::chrono::microseconds wait) override;

  // True: this thread waits at once for the answer to the call that it makes
  // next, so send() may do so, and then makes it false. Returns what it was.
  static bool setSynchronous(bool value);
  // Waits for the answer to the last call of this thread, whose future is
  // `future`, in the way that is fastest; may return before it is there.
  // `interrupted` runs after a signal of the system, and each second, and may
  // throw.
  void await(rpc::JitFuture& future, const std::function<void()>& interrupted);

  // ---- ours ----
  // What other members need to reach this one.
  std::string address() const;
  const Membership& membership() const {
    return membership_;
  }
  // What all members share, before the first connection: the group's id, and
  // the secret that lets them in. The members are added after it.
  void setGroup(const std::string& id, const std::string& secret);
  // Adds a member, or puts it in the place of its former life, which is dead.
  void addMember(
      const std::string& name,
      rpc::worker_id_t id,
      std::string address,
      uint32_t life);
  void removeMember(const std::string& name) {
    membership_.remove(name);
    events_.removed(name);
  }
  // An error if the RRef's owner has died since it was made; none if it has
  // not been started again, when its calls fail by themselves.
  base::Error ownerDied(const rpc::RRefId& rref, rpc::worker_id_t owner) const;
  void setDeviceMaps(
      std::unordered_map<std::string, rpc::DeviceMap> deviceMaps,
      std::unordered_map<std::string, rpc::DeviceMap> reverseDeviceMaps,
      std::vector<c10::Device> devices);
  std::map<std::string, transport::PathInfo> paths() const {
    return peers_.paths();
  }
  // Whose requests wait here for room, by name.
  std::map<std::string, Admission::Load> waitingCallers() const;
  // How CUDA tensors go to a worker; empty before the first one.
  device::Ipc::Description devicePath(const std::string& worker) const {
    return ipc_->describe(worker);
  }
  // Workers that were reached once and cannot be now.
  std::vector<std::string> lostWorkers() const {
    return peers_.lost();
  }
  // The worker at the other end, also when the connection has ended.
  std::string nameOf(const transport::ConnectionPtr& connection) const {
    return peers_.nameOf(connection.get());
  }
  // Connects to a worker, so that its death is noticed.
  void watch(rpc::worker_id_t id);
  // What happens to the other workers.
  WorkerEvents& events() {
    return events_;
  }
  // What is to be done when the callers of running functions are lost.
  LostCallers& callers() {
    return callers_;
  }
  // False once it has been noticed that a worker is gone. Throws for one that
  // is not in the group.
  bool isAlive(const std::string& worker);
  // By name: times in ns, sizes in bytes.
  std::map<std::string, metrics::Distribution> histograms() const;
  // While a profiler is on: keeps up to `most` calls of each side, and measures
  // the waits for the GIL, until endCallLog().
  void beginCallLog(size_t most);
  struct LoggedCalls {
    std::vector<metrics::LoggedCall> sent;
    std::vector<metrics::LoggedCall> served;
  };
  LoggedCalls endCallLog();
  // The number of this thread's last call; 0 for none.
  static uint64_t lastCallId();
  // Has `hook` run if that call fails, before anybody hears of it. False when
  // it is ending already.
  bool beforeFailure(uint64_t callId, std::function<void()> hook) {
    return pending_.setBeforeFailure(callId, std::move(hook));
  }
  bool isStaticGroup() const {
    return isStaticGroup_;
  }
  // Lets go of values that may be Python's.
  void setDropValues(std::function<void(RRefs)> drop) {
    dropValues_ = std::move(drop);
  }
  // Called every 100 ms while join() waits; throws to end it.
  void setInterruptCheck(std::function<void()> check) {
    interruptCheck_ = std::move(check);
  }
  // Runs before the first message is served.
  void setStartHook(std::function<void()> hook) {
    startHook_ = std::move(hook);
  }
  // See Executor.
  void setThreadScope(Executor::ThreadScope scope) {
    executor_.setThreadScope(std::move(scope));
  }
  // Looks into responses for what the remote function raised; null for a
  // result. Without it upstream's code does, which keeps only some types.
  using ExceptionDecoder =
      std::function<std::exception_ptr(const rpc::Message&)>;
  void setExceptionDecoder(ExceptionDecoder decoder) {
    exceptionDecoder_ = std::move(decoder);
  }
  // Before the first message; see device::Launcher.
  void setKernelSource(cuda::PtxSource source) {
    launcher_.setSource(std::move(source));
  }
  size_t pendingCalls() const {
    return pending_.size();
  }
  size_t pendingDeadlines() const {
    return pending_.withDeadline();
  }

 private:
  // A message on its way in, until it can be served.
  struct Arrival;
  // A request from then until its answer.
  struct Served;
  struct Waiter;
  // Whom an answer goes to, and how the request asked for it.
  struct Asker {
    transport::ConnectionPtr connection;
    uint64_t callId = 0;
    std::optional<wire::WireDtype> dtype = std::nullopt;
    bool checked = false; // as the request was
  };

  // ---- transport::Handler ----
  std::string introduction() override;
  base::Error onAccept(
      const transport::ConnectionPtr& connection,
      const std::string& hello) override;
  base::Error onConnected(
      const transport::ConnectionPtr& connection,
      const std::string& hello) override;
  void onFrame(
      const transport::ConnectionPtr& connection,
      std::unique_ptr<transport::Incoming> incoming) override;
  void onClosed(
      const transport::ConnectionPtr& connection,
      const base::Error& error) override;

  // Looks into the receive memory after a while, for what is idle.
  void trimLater();
  void trim();
  void heardOf(const transport::ConnectionPtr& connection);
  // What a worker that is lost has begun and held here in that life: autograd
  // contexts (pytorch issue 26379), and RRefs if it is dead.
  void release(const Membership::MemberPtr& worker, bool died);

  // Has the bulk of a request fetched when there is room for it.
  // Answers that too many wait already.
  void refuse(const Arrival& arrival);
  void fetchWhenAdmitted(std::shared_ptr<Arrival> arrival, uint64_t bytes);
  void fetchBulk(std::shared_ptr<Arrival> arrival);
  void dispatch(std::shared_ptr<Arrival> arrival);
  void completeLater(std::shared_ptr<Arrival> arrival);
  void serveLater(std::shared_ptr<Arrival> arrival);

  // Server side.
  void serve(const std::shared_ptr<Arrival>& arrival);
  void serveBarrier(
      const transport::ConnectionPtr& connection,
      uint64_t callId,
      const rpc::Message& message);
  c10::intrusive_ptr<rpc::JitFuture> execute(
      c10::intrusive_ptr<rpc::Message> request,
      device::Streams streams);
  // Takes note of a request whose caller has given up.
  void notBegun(Arrival& arrival);
  void answer(Served served, c10::intrusive_ptr<rpc::Message> response);
  static c10::intrusive_ptr<rpc::Message> responseOf(
      rpc::JitFuture& future,
      uint64_t callId);
  void reply(const Asker& asker, c10::intrusive_ptr<rpc::Message> message);
  void sendReply(const transport::ConnectionPtr& connection, Encoded encoded);
  void sendReplyNow(
      const transport::ConnectionPtr& connection,
      Encoded encoded);
  void replyUnsent(
      const transport::ConnectionPtr& connection,
      uint64_t callId,
      const base::Error& why);

  // How messages are written (ucx_agent_encoding.cpp).
  EncodeOptions requestOptions(
      uint64_t callId,
      uint32_t timeout,
      const std::string& worker,
      const transport::ConnectionPtr& connection);
  EncodeOptions answerOptions(const Asker& asker);
  void keepCacheTidy(const EncodeOptions& options);

  // Tensors of devices, both sides (ucx_agent_devices.cpp).
  using Ready = std::function<void(base::Result<Encoded>)>;
  std::shared_ptr<device::SendingWay> wayTo(
      const transport::ConnectionPtr& connection);
  std::shared_ptr<device::ReceivingWay> wayFrom(
      const transport::ConnectionPtr& connection,
      base::ConstSpan note);
  device::Ipc::Links ipcLinks();
  void tellOfIpc(
      const transport::ConnectionPtr& connection,
      device::IpcMessage kind,
      std::vector<char> payload);
  void serveIpc(Arrival& arrival);
  transport::Incoming::Arrived landEarly(Arrival& arrival);
  base::Result<c10::intrusive_ptr<rpc::Message>> decode(Arrival& arrival);
  // Makes Arrival::message. False while devices compute its checksums: `again`
  // runs when they have been compared.
  bool decoded(
      const std::shared_ptr<Arrival>& arrival,
      std::function<void()> again);
  base::Error encodeFromDevices(
      const c10::intrusive_ptr<rpc::Message>& message,
      const EncodeOptions& options,
      const device::Route& route,
      device::SendingWay* beside,
      Ready ready);
  base::Error sendFromDevices(
      const EncodeOptions& options,
      const c10::intrusive_ptr<rpc::Message>& message,
      const device::Route& route,
      const transport::ConnectionPtr& connection);
  void replyFromDevices(
      const transport::ConnectionPtr& connection,
      const EncodeOptions& options,
      const c10::intrusive_ptr<rpc::Message>& message,
      const device::Route& route);

  // Client side.
  // Two ways to wait for `future`, of the answer to a call of this thread: to
  // serve the transport oneself, and to let another thread do so and take the
  // answer from it. False after a signal of the system, and each second.
  // `signals`: the future tells leaders of its completion already.
  static bool
  lead(Executor::Leader& leader, rpc::JitFuture& future, bool& signals);
  bool receive(uint64_t callId, rpc::JitFuture& future);
  // This thread is in lead() for that call.
  bool awaitedHere(uint64_t callId) const;
  // Takes its call from those under way, as never made.
  void withdraw(uint64_t callId);
  void sendCall(
      uint64_t callId,
      Encoded encoded,
      const transport::ConnectionPtr& connection);
  void sendCallNow(
      uint64_t callId,
      Encoded encoded,
      const transport::ConnectionPtr& connection);
  void complete(const std::shared_ptr<Arrival>& arrival);
  void finish(PendingCall call, c10::intrusive_ptr<rpc::Message> message);
  void fail(PendingCall call, const base::Error& error);
  void failed(const PendingCall& call, std::exception_ptr why);
  void failLater(PendingCall call, const base::Error& error);
  void callEnded(const PendingCall& call);
  // For messages about an RRef that the callee's former life owned.
  base::Error ownerDied(const rpc::Message& message, rpc::worker_id_t owner)
      const;
  void log(const PendingCall& call, bool failed);
  // Waits for room where the callee has much to do; only what users call.
  base::Error limit(PendingCall& call, const rpc::Message& message);

  // Shutdown.
  void waitForOwnCalls(std::chrono::steady_clock::time_point deadline);
  void waitForReaders(std::chrono::steady_clock::time_point deadline);
  int64_t barrier(
      int64_t active,
      std::chrono::steady_clock::time_point deadline);

  const AgentOptions options_;
  const bool isStaticGroup_;
  Executor executor_; // first: the others use its Poller
  const std::shared_ptr<memory::BufferCache> cache_;
  Lender lender_;
  metrics::Counters counters_;
  metrics::CallLog sentLog_;
  metrics::CallLog servedLog_;
  std::atomic<bool> gilProfiled_{false}; // before beginCallLog()
  Membership membership_;
  std::shared_ptr<transport::Context> remote_;
  std::shared_ptr<transport::Context> loopback_;
  Peers peers_;
  PendingCalls pending_;
  LoadLimits load_;
  Admission admission_;
  QueuedFrames queuedFrames_;
  Creations creations_;
  RunningRequests runningRequests_;
  LostCallers callers_;
  WorkerEvents events_;
  Barrier barrier_;
  uint64_t barrierRound_ = 0;
  std::function<void()> interruptCheck_;
  std::function<void()> startHook_;
  std::function<void(RRefs)> dropValues_;
  ExceptionDecoder exceptionDecoder_;

  std::mutex callCountMutex_;
  std::condition_variable callCountChanged_;

  device::Tables devices_;
  // Messages that take memory of devices before they are served.
  const std::shared_ptr<std::atomic<int>> landings_ =
      std::make_shared<std::atomic<int>>(0);
  device::Launcher launcher_;
  device::SameProcess sameProcess_{launcher_};
  device::EventWaiter deviceEvents_;
  const std::shared_ptr<device::Ipc> ipc_; // after what it links to
  std::atomic<bool> stopped_{false};
  std::atomic<bool> trimming_{false};
  base::Timer trimTimer_; // last: its handler uses the others
};

} // namespace torch_rpc_ext::agent
