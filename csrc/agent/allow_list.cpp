#include "agent/allow_list.h"

#include <string_view>

namespace torch_rpc_ext::agent {

using torch::distributed::rpc::ScriptCall;

namespace {

// TorchScript's names are those of Python behind this; functions of __main__
// stand directly below it.
constexpr std::string_view kRoot = "__torch__.";

// Modules that torch generates for RemoteModule (nn/jit/instantiator.py). They
// only call forward() of a module that lives here.
constexpr std::string_view kRemoteModule = "_remote_module_";

} // namespace

std::string nameOf(const ScriptCall& call) {
  if (call.hasOp()) {
    return call.op()->schema().name();
  }
  std::string name = call.qualifiedName().qualifiedName();
  if (name.starts_with(kRoot)) {
    name.erase(0, kRoot.size());
  }
  return name.find('.') == std::string::npos ? "__main__." + name : name;
}

bool AllowList::allows(const ScriptCall& call) const {
  if (everything) {
    return true;
  }
  const std::string name = nameOf(call);
  if (names.contains(name)) {
    return true;
  }
  if (call.hasOp()) {
    return false;
  }
  const std::string module = name.substr(0, name.rfind('.'));
  return modules.contains(module) || module.starts_with(kRemoteModule);
}

} // namespace torch_rpc_ext::agent
