#pragma once

#include <torch/csrc/distributed/rpc/script_call.h>

#include <string>
#include <unordered_set>

namespace torch_rpc_ext::agent {

// In the text of every refusal, for people: between processes the kind travels
// as a code (failure_message.h).
inline constexpr const char* kNotAllowed = "is not in its allow_list";

// Which builtin operators and TorchScript functions peers may run. What they
// may run of Python is decided in torch_rpc_ext/_security/allow_list.py, which
// also makes these names from the option.
struct AllowList {
  bool everything = true;
  std::unordered_set<std::string> names; // "aten::add", "module.function"
  std::unordered_set<std::string> modules; // all TorchScript functions of each

  // By the call itself and not by the bytes of its message, in which a peer
  // may write what it likes.
  bool allows(const torch::distributed::rpc::ScriptCall& call) const;
};

// "aten::add" or "module.function".
std::string nameOf(const torch::distributed::rpc::ScriptCall& call);

} // namespace torch_rpc_ext::agent
