#include "compat/script_calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
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
constexpr std::string_view kOperator = "torch.ops.";
// Source: torch/csrc/jit/serialization/pickler.cpp
constexpr std::string_view kRRefClass = "torch.distributed.rpc";

// Null where no operator has that schema: "library::op.overload(int x) -> int".
std::shared_ptr<torch::jit::Operator> findRegistered(
    const std::string& schema) {
  const auto full = schema.substr(0, schema.find('('));
  const auto dot = full.find('.');
  const c10::OperatorName name(
      full.substr(0, dot), dot == full.npos ? "" : full.substr(dot + 1));
  // The dispatcher is asked first: torch::jit keeps each name that it is asked
  // for, and peers can make up any number of names.
  if (!c10::Dispatcher::singleton().findSchema(name)) {
    return nullptr;
  }
  auto op = torch::jit::findOperatorFor(name);
  return op != nullptr && toString(op->schema()) == schema ? op : nullptr;
}

} // namespace

void OperatorCall::toIValues(std::vector<at::IValue>& values) const {
  const auto& schema = op()->schema();
  std::string name = schema.name();
  const auto colons = name.find("::");
  TORCH_INTERNAL_ASSERT(colons != name.npos, name, " has no namespace");
  name.replace(
      0, colons + 2, std::string(kOperator) + name.substr(0, colons) + ".");
  values = stack();
  values.emplace_back(toString(schema));
  values.emplace_back(std::move(name));
}

ScriptCallReader::OperatorPtr ScriptCallReader::find(
    const std::string& schema) {
  Known known;
  {
    const auto all = known_.lock();
    const auto it = all->find(schema);
    if (it == all->end()) {
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
  if (!name.starts_with(kOperator)) {
    return std::make_unique<rpc::ScriptCall>(
        c10::QualifiedName(name), std::move(values), second.toBool());
  }
  const std::string& schema = second.toStringRef();
  if (!name.starts_with(kBuiltin)) {
    return readOperator(schema, std::move(values));
  }
  if (auto op = find(schema)) {
    return std::make_unique<rpc::ScriptCall>(std::move(op), std::move(values));
  }
  auto call = rpc::ScriptCall::fromMessage(message);
  keep(schema, call->op());
  return call;
}

ScriptCallReader::ScriptCallPtr ScriptCallReader::readOperator(
    const std::string& schema,
    std::vector<at::IValue>&& arguments) {
  auto op = find(schema);
  if (op == nullptr) {
    op = findRegistered(schema);
    TORCH_CHECK(
        op != nullptr,
        "this worker has no operator ",
        schema,
        ": the library that registers it must be loaded here too, in the same "
        "version");
    keep(schema, op);
  }
  op->schema().checkAndNormalizeInputs(arguments);
  return std::make_unique<rpc::ScriptCall>(std::move(op), std::move(arguments));
}

void ScriptCallReader::keep(const std::string& schema, OperatorPtr op) {
  const auto name = c10::Symbol::fromQualString(op->schema().name());
  known_.lock()->insert_or_assign(schema, Known{name, std::move(op)});
}

} // namespace torch_rpc_ext::compat
