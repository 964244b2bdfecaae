#include "agent/allow_list.h"

#include <string_view>

namespace torch_rpc_ext::agent {

using torch::distributed::rpc::ScriptCall;

namespace {

// TorchScript's qualified name of a function is this prefix and the Python
// name. For functions of __main__ the module is left out.
constexpr std::string_view kRoot = "__torch__.";

// torch generates a Python module with this function for each RemoteModule
// (nn/jit/instantiator.py). The function only calls forward() of a module that
// lives here.
constexpr std::string_view kRemoteModule = "_remote_module_";
constexpr std::string_view kRemoteForward = "_remote_forward";

bool isOfRemoteModule(std::string_view module, std::string_view function) {
  return function == kRemoteForward && module.starts_with(kRemoteModule) &&
      module.find('.') == std::string_view::npos;
}

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

std::string moduleOf(const ScriptCall& call) {
  const std::string name = nameOf(call);
  return name.substr(0, name.rfind('.'));
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
  const std::string module = moduleOf(call);
  return modules.contains(module) ||
      isOfRemoteModule(module, call.qualifiedName().name());
}

} // namespace torch_rpc_ext::agent
