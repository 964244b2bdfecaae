#include "transport/ucx/lanes/socket.h"

#include "transport/ucx/lanes/wire.h"

#include <arpa/inet.h>
#include <netinet/in.h>
// <netinet/tcp.h> lacks tcpi_min_rtt.
#include <linux/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>

namespace torch_rpc_ext::transport::ucx::lanes {

namespace {

constexpr size_t kMaxEndpoints = 16;
constexpr size_t kMaxIpBytes = 64;
// Linux answers no question for room within half a second of the one before
// (tcp_invalid_ratelimit), and waits twice as long before each next question.
// So of two questions in a row one is answered.
constexpr int kUnansweredProbes = 2;
// How many of the kernel's probes of an idle connection must stay without an
// answer: one packet may get lost.
constexpr int kKeepaliveProbes = 3;
// Not in <linux/tcp.h> before Linux 6.15.
constexpr int kTcpRtoMaxMs = 44;

// The sockaddr of an Endpoint.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  sockaddr* get() {
    return reinterpret_cast<sockaddr*>(&storage);
  }
};

bool toSocketAddress(const Endpoint& endpoint, SocketAddress& address) {
  auto* const v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  if (inet_pton(AF_INET, endpoint.ip.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(endpoint.port);
    address.size = sizeof(*v4);
    return true;
  }
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET6, endpoint.ip.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(endpoint.port);
    address.size = sizeof(*v6);
    return true;
  }
  return false;
}

base::Error failed(const std::string& what, int error) {
  // What this process or its kernel lacks says nothing about the peer.
  const bool lacks =
      error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
  return {
      lacks ? base::ErrorKind::kSystem : base::ErrorKind::kPeerLost,
      what + ": " + std::generic_category().message(error)};
}

Socket makeSocket(const SocketAddress& address) {
  return Socket(
      ::socket(
          address.storage.ss_family,
          SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC,
          0));
}

uint16_t portOf(const Socket& socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (::getsockname(
          socket.fd(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    return 0;
  }
  return ntohs(
      storage.ss_family == AF_INET6
          ? reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port
          : reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

void set(const Socket& socket, int level, int option, int value) {
  // A kernel without the option works with its default.
  ::setsockopt(socket.fd(), level, option, &value, sizeof(value));
}

// What the kernel does not say is 0.
tcp_info infoOf(const Socket& socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  ::getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &size);
  return info;
}

} // namespace

std::string toString(const Endpoint& endpoint) {
  const bool v6 = endpoint.ip.find(':') != std::string::npos;
  return (v6 ? "[" + endpoint.ip + "]" : endpoint.ip) + ":" +
      std::to_string(endpoint.port);
}

std::string encode(const Address& address) {
  std::string bytes = address.key;
  for (const Endpoint& endpoint : address.endpoints) {
    bytes += endpoint.ip + " " + std::to_string(endpoint.port) + "\n";
  }
  return bytes;
}

base::Result<Address> parseAddress(std::string_view bytes) {
  const base::Error invalid{
      base::ErrorKind::kInvalid, "not an address for bulk over TCP"};
  if (bytes.size() < kKeyBytes) {
    return invalid;
  }
  Address address{.key = std::string(bytes.substr(0, kKeyBytes))};
  bytes.remove_prefix(kKeyBytes);
  while (!bytes.empty()) {
    const size_t space = bytes.find(' ');
    const size_t end = bytes.find('\n');
    if (space > kMaxIpBytes || end == bytes.npos || space > end ||
        address.endpoints.size() == kMaxEndpoints) {
      return invalid;
    }
    uint64_t port = 0;
    for (const char digit : bytes.substr(space + 1, end - space - 1)) {
      if (digit < '0' || digit > '9' || port > UINT16_MAX) {
        return invalid;
      }
      port = port * 10 + static_cast<uint64_t>(digit - '0');
    }
    Endpoint endpoint{
        std::string(bytes.substr(0, space)), static_cast<uint16_t>(port)};
    SocketAddress known;
    if (port == 0 || port > UINT16_MAX || !toSocketAddress(endpoint, known)) {
      return invalid;
    }
    address.endpoints.push_back(std::move(endpoint));
    bytes.remove_prefix(end + 1);
  }
  return address.endpoints.empty() ? base::Result<Address>(invalid)
                                   : base::Result<Address>(std::move(address));
}

base::Result<std::pair<Socket, Endpoint>> listenAt(
    const std::string& ip,
    std::pair<uint16_t, uint16_t> ports) {
  int error = EADDRNOTAVAIL;
  for (uint32_t port = ports.first; port <= ports.second; ++port) {
    SocketAddress address;
    if (!toSocketAddress({ip, static_cast<uint16_t>(port)}, address)) {
      return base::Error{
          base::ErrorKind::kInvalid, "\"" + ip + "\" is no IP address"};
    }
    Socket socket = makeSocket(address);
    // Lanes of an earlier receiver do not keep the port: the kernel remembers
    // those that the receiver closed for a minute. A port at which somebody
    // listens stays taken.
    set(socket, SOL_SOCKET, SO_REUSEADDR, 1);
    if (socket.fd() >= 0 &&
        ::bind(socket.fd(), address.get(), address.size) == 0 &&
        ::listen(socket.fd(), SOMAXCONN) == 0) {
      const Endpoint endpoint{ip, portOf(socket)};
      return std::pair(std::move(socket), endpoint);
    }
    error = errno;
  }
  return failed(
      "cannot listen at " + ip + " for large tensors" +
          (ports.first == 0
               ? ""
               : " (is the port range " + std::to_string(ports.first) + "-" +
                   std::to_string(ports.second) + " used up?)"),
      error);
}

Socket acceptFrom(const Socket& listener) {
  return Socket(
      ::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

base::Result<Socket> connectTo(const Endpoint& endpoint) {
  SocketAddress address;
  if (!toSocketAddress(endpoint, address)) {
    return base::Error{
        base::ErrorKind::kInvalid, "\"" + endpoint.ip + "\" is no IP address"};
  }
  Socket socket = makeSocket(address);
  if (socket.fd() < 0 ||
      (::connect(socket.fd(), address.get(), address.size) != 0 &&
       errno != EINPROGRESS)) {
    return failed("cannot connect to " + toString(endpoint), errno);
  }
  return socket;
}

void setUp(const Socket& socket, double seconds) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // The kernel counts in whole seconds here.
  const int between =
      std::max(1, static_cast<int>(seconds / (1 + kKeepaliveProbes)));
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, between);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, between);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
  set(socket,
      IPPROTO_TCP,
      TCP_USER_TIMEOUT,
      static_cast<int>(std::min<double>(seconds * 1000, INT_MAX)));
}

void setUpForSending(const Socket& socket, double seconds) {
  setUp(socket, seconds);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 0);
  // The kernel doubles the time between its questions for room, up to this. So
  // a host that is gone is found out soon, however long there was no room.
  // Before Linux 6.15 the time grows to two minutes.
  set(socket,
      IPPROTO_TCP,
      kTcpRtoMaxMs,
      static_cast<int>(std::clamp(seconds * 250, 1e3, 120e3)));
}

LastAck lastAckOf(const Socket& socket) {
  const tcp_info info = infoOf(socket);
  return {
      std::chrono::milliseconds(info.tcpi_last_ack_recv),
      info.tcpi_last_data_sent < info.tcpi_last_ack_recv ||
          info.tcpi_probes >= kUnansweredProbes};
}

base::Error brokenBecause(const Socket& socket, int error) {
  int pending = 0;
  socklen_t size = sizeof(pending);
  if (::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &pending, &size) == 0 &&
      pending != 0) {
    error = pending;
  }
  return failed(
      "a connection for large tensors broke", error == 0 ? ECONNRESET : error);
}

uint32_t roundTripMicroseconds(const Socket& socket) {
  const uint32_t shortest = infoOf(socket).tcpi_min_rtt;
  return shortest == UINT32_MAX ? 0 : shortest;
}

} // namespace torch_rpc_ext::transport::ucx::lanes
