// Operators for TorchScript, torch.ops.torch_rpc_ext.*, which tell about this
// worker and its group. They need no GIL. docs/scripting.md describes them.

#include "agent/ucx_agent.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::bindings {

namespace rpc = torch::distributed::rpc;

namespace {

std::shared_ptr<rpc::RpcAgent> currentAgent() {
  TORCH_CHECK(
      rpc::RpcAgent::isCurrentRpcAgentSet(),
      "torch_rpc_ext: RPC is not initialized in this process; call "
      "torch.distributed.rpc.init_rpc() before this operator");
  return rpc::RpcAgent::getCurrentRpcAgent();
}

// Names by id.
std::map<int64_t, std::string> members() {
  std::map<int64_t, std::string> names;
  for (const auto& info : currentAgent()->getWorkerInfos()) {
    names.emplace(info.id_, info.name_);
  }
  return names;
}

std::vector<std::string> workerNames() {
  std::vector<std::string> names;
  for (const auto& [id, name] : members()) {
    names.push_back(name);
  }
  return names;
}

std::vector<int64_t> workerIds() {
  std::vector<int64_t> ids;
  for (const auto& [id, name] : members()) {
    ids.push_back(id);
  }
  return ids;
}

std::string ownName() {
  return currentAgent()->getWorkerInfo().name_;
}

int64_t ownId() {
  return currentAgent()->getWorkerInfo().id_;
}

bool isAlive(const std::string& worker) {
  const auto ours = std::dynamic_pointer_cast<agent::UcxAgent>(currentAgent());
  TORCH_CHECK(
      ours != nullptr,
      "torch_rpc_ext::is_alive: only the UCX agent knows who is alive, and "
      "another back end is running; use init_rpc(..., "
      "backend=rpc.BackendType.UCX)");
  return ours->parts().group().isAlive(worker);
}

c10::Dict<std::string, double> metrics() {
  c10::Dict<std::string, double> numbers;
  for (const auto& [name, value] : currentAgent()->getMetrics()) {
    numbers.insert(name, std::strtod(value.c_str(), nullptr));
  }
  return numbers;
}

// The results change over time, so TorchScript must neither merge two calls nor
// evaluate a call when it compiles.
constexpr auto kChanges = c10::AliasAnalysisKind::CONSERVATIVE;

} // namespace

TORCH_LIBRARY_FRAGMENT(torch_rpc_ext, library) {
  library.def(torch::schema("worker_names() -> str[]", kChanges), &workerNames);
  library.def(torch::schema("worker_ids() -> int[]", kChanges), &workerIds);
  library.def(torch::schema("own_name() -> str", kChanges), &ownName);
  library.def(torch::schema("own_id() -> int", kChanges), &ownId);
  library.def(
      torch::schema("is_alive(str worker) -> bool", kChanges), &isAlive);
  library.def(
      torch::schema("metrics() -> Dict(str, float)", kChanges), &metrics);
}

} // namespace torch_rpc_ext::bindings
