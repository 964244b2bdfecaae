#pragma once

#include "base/synchronized.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/script_call.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::compat {

// A ScriptCall of any operator of the dispatcher. Of these operators, the class
// of upstream writes only those of aten:: into messages, and its fromMessage()
// reads only those. ScriptCallReader reads the calls of both classes.
class OperatorCall final : public torch::distributed::rpc::ScriptCall {
 public:
  using ScriptCall::ScriptCall;

 private:
  void toIValues(std::vector<at::IValue>& values) const override;
};

// Reads a ScriptCall, an OperatorCall or a ScriptRemoteCall from a message.
// Faster than upstream's fromMessage(), which for a builtin operator parses the
// schema and prints those of all overloads each time. That takes 4 to 5 us, a
// tenth of such a call; this class does it once for each schema.
//
// Owns: a table of the operators that it has read.
// Thread: any.
class ScriptCallReader {
 public:
  using ScriptCallPtr = std::unique_ptr<torch::distributed::rpc::ScriptCall>;
  using OperatorPtr = std::shared_ptr<torch::jit::Operator>;

  // Null if the arguments may hold RRefs, for which upstream has to wait.
  // Throws what fromMessage() throws.
  ScriptCallPtr read(const torch::distributed::rpc::Message& message);

 private:
  struct Known {
    c10::Symbol name;
    OperatorPtr op;
  };

  OperatorPtr find(const std::string& schema);
  void keep(const std::string& schema, OperatorPtr op);

  // By schema. Cannot grow without limit: only operators that exist get in.
  base::Synchronized<std::unordered_map<std::string, Known>> known_;
};

} // namespace torch_rpc_ext::compat
