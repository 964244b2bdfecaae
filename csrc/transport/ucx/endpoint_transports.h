#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// A transport of UCX, and the device that an endpoint uses the transport with.
struct EndpointTransport {
  std::string name; // e.g. "tcp", "posix", "rc_mlx5"
  std::string device; // e.g. "eth0", "memory", "mlx5_0:1"

  bool operator==(const EndpointTransport&) const = default;
};

// What UCX has chosen for the endpoint; empty if UCX does not say. To be called
// with the lock of the endpoint's worker held.
std::vector<EndpointTransport> transportsOf(ucp_ep_h endpoint);

// For an endpoint that uses TCP and nothing else: an IP address of each
// interface that the endpoint uses, without link-local addresses. Empty for
// other endpoints.
std::vector<std::string> tcpAddressesOf(
    const std::vector<EndpointTransport>& transports,
    bool preferIpv6);

} // namespace torch_rpc_ext::transport::ucx
