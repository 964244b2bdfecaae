#pragma once

#include <torch/csrc/distributed/rpc/script_call.h>

#include <string>
#include <unordered_set>

namespace torch_rpc_ext::agent {

// Part of the text of every refusal, for people to read. Programs go by the
// kind of the error, which travels as a code (failure_message.h).
inline constexpr const char* kNotAllowed = "is not in its allow_list";

// Which builtin operators and TorchScript functions peers may run.
// torch_rpc_ext/_security/allow_list.py makes these names from the option, and
// itself decides about Python functions.
struct AllowList {
  bool everything = true;
  std::unordered_set<std::string> names; // "aten::add", "module.function"
  std::unordered_set<std::string> modules; // all TorchScript functions of each

  // Looks at the parsed call and not at the label of its message
  // (call_label.h): a peer can make the label say anything.
  bool allows(const torch::distributed::rpc::ScriptCall& call) const;
};

// "aten::add" or "module.function".
std::string nameOf(const torch::distributed::rpc::ScriptCall& call);
// Of the TorchScript function that the call names.
std::string moduleOf(const torch::distributed::rpc::ScriptCall& call);

} // namespace torch_rpc_ext::agent
