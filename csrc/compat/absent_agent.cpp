#include "compat/absent_agent.h"

#include "compat/torch_compat.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::compat {

namespace rpc = torch::distributed::rpc;

namespace {

// Stands for the agent where there is none.
class AbsentAgent final : public rpc::RpcAgent {
 public:
  AbsentAgent()
      : RpcAgent(
            rpc::WorkerInfo("none", int64_t{0}),
            nullptr,
            std::chrono::seconds(1)) {}

  c10::intrusive_ptr<rpc::JitFuture> send(
      const rpc::WorkerInfo& /*to*/,
      c10::intrusive_ptr<rpc::Message> /*message*/,
      const float /*rpcTimeoutSeconds*/,
      const rpc::DeviceMap& /*deviceMap*/) override {
    fail();
  }
  const rpc::WorkerInfo& getWorkerInfo(
      const std::string& /*name*/) const override {
    fail();
  }
  const rpc::WorkerInfo& getWorkerInfo(rpc::worker_id_t /*id*/) const override {
    fail();
  }
  std::vector<rpc::WorkerInfo> getWorkerInfos() const override {
    return {};
  }
  void join(bool /*shutdown*/, float /*timeout*/) override {}
  void sync() override {}
  void startImpl() override {}
  void shutdownImpl() override {}
  std::unordered_map<std::string, std::string> getMetrics() override {
    return {};
  }
  void addGilWaitTime(const std::chrono::microseconds /*wait*/) override {}

 private:
  [[noreturn]] static void fail() {
    throw std::runtime_error(
        "RPC is not initialized: call torch.distributed.rpc.init_rpc() first");
  }
};

} // namespace

void letFormerAgentGo() {
  rpc::RRefContext* context = nullptr;
  try {
    context = &rpc::RRefContext::getInstance();
  } catch (const c10::Error&) {
    return; // upstream makes the RRefContext with the first agent
  }
  agentOf(*context) = std::make_shared<AbsentAgent>();
}

} // namespace torch_rpc_ext::compat
