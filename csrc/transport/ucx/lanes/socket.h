#pragma once

#include "base/descriptor.h"
#include "base/error.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx::lanes {

// An IPv4 or IPv6 address, as text, and a port.
struct Endpoint {
  std::string ip;
  uint16_t port = 0;

  bool operator==(const Endpoint&) const = default;
};
std::string toString(const Endpoint& endpoint);

// Where a receiver of bulk is reached, and the key that it wants to hear.
struct Address {
  std::vector<Endpoint> endpoints = {};
  std::string key = {};

  bool operator==(const Address&) const = default;
};
std::string encode(const Address& address);
base::Result<Address> parseAddress(std::string_view bytes);

// A socket that does not block.
using Socket = base::Descriptor;

// Listens at a local address, on one of the ports from first to last, or on any
// port if `ports` is {0, 0}.
base::Result<std::pair<Socket, Endpoint>> listenAt(
    const std::string& ip,
    std::pair<uint16_t, uint16_t> ports);
// The next connection that waits; a Socket without a descriptor, and a reason
// in errno, if there is none.
Socket acceptFrom(const Socket& listener);
// Begins to connect: the socket becomes writable when the connection is open or
// has failed.
base::Result<Socket> connectTo(const Endpoint& endpoint);

// For how many times the keepalive time the other host of an open lane may be
// silent. More than once, because a lane that ends loses a message: whether the
// peer is lost, the connection for calls decides.
constexpr double kPatience = 4;

// Lets the kernel end the connection when the other host has been silent for
// `seconds`, and send small messages at once.
void setUp(const Socket& socket, double seconds);
// The same, but the kernel does not end the connection while data waits to be
// sent or acknowledged. It would do so, too, where the other process takes
// nothing and the other host answers. Whoever sends looks at lastAckOf().
void setUpForSending(const Socket& socket, double seconds);

// The other host's last acknowledgement.
struct LastAck {
  std::chrono::milliseconds age{0};
  // Another one is due: data was sent since, or the question whether there is
  // room for more.
  bool nextIsDue = false;
};
LastAck lastAckOf(const Socket& socket);
// Why the socket broke, as the kernel says; if the kernel says nothing, what
// `error` means, which is a value of errno.
base::Error brokenBecause(const Socket& socket, int error);
// The shortest round trip that the kernel has seen; 0 if it does not say.
uint32_t roundTripMicroseconds(const Socket& socket);

} // namespace torch_rpc_ext::transport::ucx::lanes
