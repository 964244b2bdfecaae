#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/script_call.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace torch_rpc_ext::compat {

// Reads a ScriptCall from a message, as ScriptCall::fromMessage() does, but
// faster. For a builtin operator, fromMessage() parses the schema and prints
// those of all overloads each time, which takes 4 to 5 us, a tenth of such a
// call. This class does so once for each schema.
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

  std::mutex mutex_;
  // Cannot grow without limit: only operators that exist get in.
  std::unordered_map<std::string, Known> known_; // by schema
};

} // namespace torch_rpc_ext::compat
