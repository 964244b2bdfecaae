#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/script_call.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace torch_rpc_ext::compat {

// Reads what ScriptCall::fromMessage() reads. That one parses the schema of a
// builtin operator each time and prints those of all its overloads, which takes
// 4 to 5 us, a tenth of such a call; here each schema is looked up once.
//
// Owns: the operators that it has seen.
// Thread: any.
class ScriptCallReader {
 public:
  using ScriptCallPtr = std::unique_ptr<torch::distributed::rpc::ScriptCall>;

  // Null where the arguments hold RRefs, which upstream waits for. Raises as
  // fromMessage() does.
  ScriptCallPtr read(const torch::distributed::rpc::Message& message);

 private:
  using OperatorPtr = std::shared_ptr<torch::jit::Operator>;
  struct Known {
    c10::Symbol name;
    OperatorPtr op;
  };

  OperatorPtr find(const std::string& schema);

  std::mutex mutex_;
  // As many as peers call: only what exists gets in.
  std::unordered_map<std::string, Known> known_; // by schema
};

} // namespace torch_rpc_ext::compat
