#include "compat/script_calls.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_rpc_ext::compat {

namespace rpc = torch::distributed::rpc;

namespace {

// Source: torch/csrc/distributed/rpc/script_call.cpp
constexpr std::string_view kBuiltin = "torch.ops.aten.";
// Source: torch/csrc/jit/serialization/pickler.cpp
constexpr std::string_view kRRefClass = "torch.distributed.rpc";

} // namespace

ScriptCallReader::OperatorPtr ScriptCallReader::find(
    const std::string& schema) {
  Known known;
  {
    std::lock_guard lock(mutex_);
    const auto it = known_.find(schema);
    if (it == known_.end()) {
      return nullptr;
    }
    known = it->second;
  }
  // The operator's library may have been unloaded since, and with it what the
  // operator refers to. So do not use the operator before it is found among the
  // registered ones.
  const auto registered = torch::jit::getAllOperatorsFor(known.name);
  const bool isThere =
      std::find(registered.begin(), registered.end(), known.op) !=
      registered.end();
  return isThere ? known.op : nullptr;
}

ScriptCallReader::ScriptCallPtr ScriptCallReader::read(
    const rpc::Message& message) {
  const auto& payload = message.payload();
  const std::string_view bytes(payload.data(), payload.size());
  if (bytes.find(kRRefClass) != std::string_view::npos) {
    return nullptr;
  }
  const auto tuple = torch::jit::unpickle(
      payload.data(),
      payload.size(),
      *rpc::RpcAgent::getCurrentRpcAgent()->getTypeResolver(),
      message.tensors());
  // (arguments, schema, "torch.ops.aten.name") of an operator, else
  // (arguments, whether it is async, "__torch__.module.name").
  std::vector<at::IValue> values = tuple.toTupleRef().elements().vec();
  if (values.size() < 2) {
    return rpc::ScriptCall::fromMessage(message); // throws torch's own error
  }
  const std::string name = values.back().toStringRef();
  values.pop_back();
  const at::IValue second = std::move(values.back());
  values.pop_back();
  if (!name.starts_with(kBuiltin)) {
    return std::make_unique<rpc::ScriptCall>(
        c10::QualifiedName(name), std::move(values), second.toBool());
  }
  const std::string& schema = second.toStringRef();
  if (auto op = find(schema)) {
    return std::make_unique<rpc::ScriptCall>(std::move(op), std::move(values));
  }
  auto call = rpc::ScriptCall::fromMessage(message);
  std::lock_guard lock(mutex_);
  known_.insert_or_assign(
      schema,
      Known{
          c10::Symbol::fromQualString(call->op()->schema().name()),
          call->op()});
  return call;
}

} // namespace torch_rpc_ext::compat
