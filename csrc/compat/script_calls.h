#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/script_call.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::compat {

// A call of any operator of the dispatcher: upstream's writes those of aten::
// only. ScriptCallReader reads both; upstream's fromMessage() does not.
class OperatorCall final : public torch::distributed::rpc::ScriptCall {
 public:
  using ScriptCall::ScriptCall;

 private:
  void toIValues(std::vector<at::IValue>& values) const override;
};

// Reads a ScriptCall from a message, as ScriptCall::fromMessage() does, but
// faster, and OperatorCalls. For a builtin operator, fromMessage() parses the
// schema and prints those of all overloads each time, which takes 4 to 5 us, a
// tenth of such a call. This class does so once for each schema.
//
// Owns: a table of the operators it has read.
// Thread: any.
class ScriptCallReader {
 public:
  using ScriptCallPtr = std::unique_ptr<torch::distributed::rpc::ScriptCall>;

  // Null if the arguments may hold RRefs, for which upstream has to wait.
  // Throws what fromMessage() throws.
  ScriptCallPtr read(const torch::distributed::rpc::Message& message);

 private:
  using OperatorPtr = std::shared_ptr<torch::jit::Operator>;
  struct Known {
    c10::Symbol name;
    OperatorPtr op;
  };

  OperatorPtr find(const std::string& schema);
  // Of an OperatorCall, whose arguments are checked: upstream checks none.
  ScriptCallPtr readOperator(
      const std::string& schema,
      std::vector<at::IValue>&& arguments);
  void keep(const std::string& schema, OperatorPtr op);

  std::mutex mutex_;
  // Cannot grow without limit: only operators that exist get in.
  std::unordered_map<std::string, Known> known_; // by schema
};

} // namespace torch_rpc_ext::compat
