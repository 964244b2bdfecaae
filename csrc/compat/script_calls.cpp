#include "compat/script_calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <optional>
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

// The RRef that a ScriptRemoteCall creates, and the caller's fork of that RRef.
struct Created {
  rpc::RRefId rref;
  rpc::ForkId fork;
};

ScriptCallReader::ScriptCallPtr callOf(
    ScriptCallReader::OperatorPtr op,
    std::vector<at::IValue>&& arguments,
    const std::optional<Created>& created) {
  if (created) {
    return std::make_unique<rpc::ScriptRemoteCall>(
        std::move(op), std::move(arguments), created->rref, created->fork);
  }
  return std::make_unique<rpc::ScriptCall>(std::move(op), std::move(arguments));
}

ScriptCallReader::ScriptCallPtr fromMessage(const rpc::Message& message) {
  if (message.type() == rpc::MessageType::SCRIPT_REMOTE_CALL) {
    return rpc::ScriptRemoteCall::fromMessage(message);
  }
  return rpc::ScriptCall::fromMessage(message);
}

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
  // (arguments, whether it is async, "__torch__.module.name"). A
  // ScriptRemoteCall has also the ids of the RRef and of the fork at the end.
  std::vector<at::IValue> values = tuple.toTupleRef().elements().vec();
  const bool creates = message.type() == rpc::MessageType::SCRIPT_REMOTE_CALL;
  if (values.size() < (creates ? 4 : 2)) {
    return fromMessage(message); // throws torch's own error
  }
  const auto pop = [&values] {
    at::IValue last = std::move(values.back());
    values.pop_back();
    return last;
  };
  std::optional<Created> created;
  if (creates) {
    const auto fork = rpc::ForkId::fromIValue(pop());
    created.emplace(rpc::RRefId::fromIValue(pop()), fork);
  }
  const std::string name = pop().toStringRef();
  const at::IValue second = pop();
  if (!name.starts_with(kOperator)) {
    const c10::QualifiedName function(name);
    const bool isAsync = second.toBool();
    if (created) {
      return std::make_unique<rpc::ScriptRemoteCall>(
          function, std::move(values), created->rref, created->fork, isAsync);
    }
    return std::make_unique<rpc::ScriptCall>(
        function, std::move(values), isAsync);
  }
  const std::string& schema = second.toStringRef();
  const bool isBuiltin = name.starts_with(kBuiltin);
  auto op = find(schema);
  if (op == nullptr && isBuiltin) {
    auto call = fromMessage(message);
    keep(schema, call->op());
    return call;
  }
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
  if (!isBuiltin) {
    op->schema().checkAndNormalizeInputs(values); // upstream does not
  }
  return callOf(std::move(op), std::move(values), created);
}

void ScriptCallReader::keep(const std::string& schema, OperatorPtr op) {
  const auto name = c10::Symbol::fromQualString(op->schema().name());
  known_.lock()->insert_or_assign(schema, Known{name, std::move(op)});
}

} // namespace torch_rpc_ext::compat
