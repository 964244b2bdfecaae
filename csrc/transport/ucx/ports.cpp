#include "transport/ucx/ports.h"

#include "base/descriptor.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

namespace torch_rpc_ext::transport::ucx {

namespace {

template <typename SocketAddress>
bool canBind(int family, const SocketAddress& address) {
  // Without SO_REUSEADDR, as UCX binds: so a port is not free for a minute
  // after a worker that had connections there has ended.
  const base::Descriptor socket(
      ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return socket.fd() < 0 ||
      ::bind(
          socket.fd(),
          reinterpret_cast<const sockaddr*>(&address),
          sizeof(address)) == 0 ||
      errno != EADDRINUSE;
}

} // namespace

bool isFree(uint16_t port) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  return canBind(AF_INET, v4) && canBind(AF_INET6, v6);
}

} // namespace torch_rpc_ext::transport::ucx
