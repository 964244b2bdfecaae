#pragma once

#include "agent/agent_hooks.h"
#include "agent/agent_metrics.h"
#include "agent/agent_options.h"
#include "agent/agent_parts.h"
#include "metrics/call_log.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

// torch's RpcAgent: passes the calls of torch on to the parts of the agent. It
// contains no protocol itself.
//
// Owns: the parts.
// Thread: any.
// Outlives: the threads of the parts, which end with stop().
class UcxAgent final : public rpc::RpcAgent {
 public:
  UcxAgent(
      AgentOptions options,
      const std::string& name,
      rpc::worker_id_t id,
      bool isStaticGroup,
      std::unique_ptr<rpc::RequestCallback> callback,
      AgentHooks hooks);
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
  void shutdownImpl() override {
    stop();
  }
  const rpc::WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const rpc::WorkerInfo& getWorkerInfo(rpc::worker_id_t id) const override;
  std::vector<rpc::WorkerInfo> getWorkerInfos() const override;
  using rpc::RpcAgent::getWorkerInfo;
  Metrics getMetrics() override;
  Metrics getDebugInfo() override;
  rpc::DeviceMap getDeviceMap(const rpc::WorkerInfo& to) const override;
  const std::vector<c10::Device>& getDevices() const override;
  void addGilWaitTime(std::chrono::microseconds wait) override;

  AgentParts& parts() {
    return parts_;
  }
  const AgentParts& parts() const {
    return parts_;
  }

  // Ends all that this agent does: no request is served any more, no call is
  // answered, and the threads end. A second call returns at once, even if the
  // first is still at work. To be called before upstream's RRefContext is
  // destroyed, because that destruction takes no lock. shutdown() also calls
  // stop(), but is to be called after the destruction: once shutdown() has been
  // called, send() throws, and each RRef that dies while the RRefContext still
  // exists would log the exception.
  void stop();
  bool stopped() const {
    return stopped_.load();
  }
  // To be called in a forked child, where the agent's threads do not exist and
  // UCX belongs to the parent: from here on nothing is sent, not even for RRefs
  // that die.
  void abandon() {
    rpcAgentRunning_.store(false);
  }
  // Name -> distribution; times are in ns, sizes in bytes.
  std::map<std::string, metrics::Distribution> histograms() const {
    return histogramsOf(parts_.counters());
  }
  // For a profiler: until endCallLog(), logs up to `most` calls sent and as
  // many served, and measures the waits for the GIL.
  void beginCallLog(size_t most);
  struct LoggedCalls {
    std::vector<metrics::LoggedCall> sent;
    std::vector<metrics::LoggedCall> served;
  };
  LoggedCalls endCallLog();

 private:
  std::atomic<bool> stopped_{false};
  std::atomic<bool> gilProfiled_{false}; // as it was before beginCallLog()
  AgentParts parts_;
};

} // namespace torch_rpc_ext::agent
