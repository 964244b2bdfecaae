#include "base/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <memory>
#include <system_error>

namespace torch_rpc_ext::base {

std::map<std::string, Interface> networkInterfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    throw std::system_error(errno, std::generic_category(), "getifaddrs");
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::map<std::string, Interface> interfaces;
  for (const ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    Interface& interface = interfaces[it->ifa_name];
    interface.up = (it->ifa_flags & IFF_UP) != 0;
    const int family = it->ifa_addr != nullptr ? it->ifa_addr->sa_family : 0;
    if (family != AF_INET && family != AF_INET6) {
      continue;
    }
    std::array<char, NI_MAXHOST> text{};
    const socklen_t size =
        family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(
            it->ifa_addr,
            size,
            text.data(),
            text.size(),
            nullptr,
            0,
            NI_NUMERICHOST) == 0) {
      interface.addresses.emplace_back(text.data());
    }
  }
  return interfaces;
}

} // namespace torch_rpc_ext::base
