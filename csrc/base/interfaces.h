#pragma once

#include <map>
#include <string>
#include <vector>

namespace torch_rpc_ext::base {

// A network interface of this host.
struct Interface {
  bool up = false;
  // IPv4 and IPv6 addresses, as text; link-local IPv6 addresses with %scope.
  std::vector<std::string> addresses;
};

// All interfaces, by name. Throws std::system_error.
std::map<std::string, Interface> networkInterfaces();

} // namespace torch_rpc_ext::base
