#pragma once

#include "agent/agent_hooks.h"
#include "agent/agent_metrics.h"
#include "agent/agent_options.h"
#include "agent/caller.h"
#include "agent/context_cleanup.h"
#include "agent/devices.h"
#include "agent/executor.h"
#include "agent/fork_requests.h"
#include "agent/group.h"
#include "agent/group_shutdown.h"
#include "agent/receive_memory.h"
#include "agent/receiver.h"
#include "agent/server.h"
#include "agent/unread_rrefs.h"
#include "metrics/counters.h"
#include "transport/transport.h"

#include <torch/csrc/distributed/rpc/request_callback.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace torch_rpc_ext::agent {

// The parts of an agent: makes them, connects them with each other and with the
// transport, and ends them.
//
// Owns: the parts, the threads (Executor), the counters.
// Thread: any.
// Outlives: the transport's callbacks, which end with stop().
class AgentParts final : private transport::Handler {
 public:
  // The references outlive the AgentParts.
  AgentParts(
      AgentOptions options,
      const Group::WorkerInfo& self,
      bool isStaticGroup,
      torch::distributed::rpc::RequestCallback& callback,
      AgentHooks hooks);

  // Peers may connect from here on.
  void start();
  // No request is served any more, no call is answered, and the threads end.
  // Waits for functions that peers have called and that still run, for as long
  // as `patience`. False if one runs even then: its thread uses the parts until
  // the process ends. To be called once.
  [[nodiscard]] bool stop(std::chrono::milliseconds patience);

  Group& group() {
    return group_;
  }
  const Group& group() const {
    return group_;
  }
  Devices& devices() {
    return devices_;
  }
  const Devices& devices() const {
    return devices_;
  }
  Caller& caller() {
    return caller_;
  }
  ForkRequests& forkRequests() {
    return forkRequests_;
  }
  ContextCleanup& contextCleanup() {
    return contextCleanup_;
  }
  Server& server() {
    return server_;
  }
  GroupShutdown& groupShutdown() {
    return groupShutdown_;
  }
  const Receiver& receiver() const {
    return receiver_;
  }
  const metrics::Counters& counters() const {
    return counters_;
  }

  void addTo(Metrics& metrics) const;

 private:
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
  std::shared_ptr<void> onFrameAhead(
      const transport::ConnectionPtr& connection) override;
  void onClosed(
      const transport::ConnectionPtr& connection,
      const base::Error& error) override;

  // Through these two functions a part calls parts that are below it in this
  // class, so no part needs a reference to them. No RPC takes this path.
  Group::Listeners listeners(AgentHooks& hooks);
  bool trimParts(ReceiveMemory::Duration idle);

  const AgentOptions options_;
  const std::function<void()> startHook_;
  metrics::Counters counters_;
  // Each part refers to parts above it, which are made before and destroyed
  // after it. The threads come first, then the memory, because the transport
  // may hold blocks of the memory until it is destroyed.
  Executor executor_;
  UnreadRRefs unreadRRefs_;
  ReceiveMemory memory_;
  Group group_;
  Devices devices_;
  Caller caller_;
  ForkRequests forkRequests_;
  ContextCleanup contextCleanup_;
  Server server_;
  GroupShutdown groupShutdown_;
  Receiver receiver_;
};

} // namespace torch_rpc_ext::agent
