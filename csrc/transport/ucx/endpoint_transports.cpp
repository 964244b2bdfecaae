#include "transport/ucx/endpoint_transports.h"

#include "base/interfaces.h"

#include <algorithm>

namespace torch_rpc_ext::transport::ucx {

namespace {

// More than any endpoint has lanes.
constexpr size_t kMaxTransports = 64;

bool isIpv6(const std::string& address) {
  return address.find(':') != std::string::npos;
}

bool isLinkLocal(const std::string& address) {
  return address.find('%') != std::string::npos;
}

} // namespace

std::vector<EndpointTransport> transportsOf(ucp_ep_h endpoint) {
  std::vector<ucp_transport_entry_t> entries(kMaxTransports);
  ucp_ep_attr_t attr{};
  attr.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attr.transports.entries = entries.data();
  attr.transports.num_entries = entries.size();
  attr.transports.entry_size = sizeof(ucp_transport_entry_t);
  if (endpoint == nullptr || ucp_ep_query(endpoint, &attr) != UCS_OK) {
    return {};
  }
  std::vector<EndpointTransport> transports;
  for (unsigned i = 0; i < attr.transports.num_entries; ++i) {
    EndpointTransport transport{
        entries[i].transport_name, entries[i].device_name};
    if (std::find(transports.begin(), transports.end(), transport) ==
        transports.end()) {
      transports.push_back(std::move(transport));
    }
  }
  return transports;
}

std::vector<std::string> tcpAddressesOf(
    const std::vector<EndpointTransport>& transports,
    bool preferIpv6) {
  if (!std::all_of(
          transports.begin(), transports.end(), [](const auto& transport) {
            return transport.name == "tcp";
          })) {
    return {};
  }
  const auto interfaces = base::networkInterfaces();
  std::vector<std::string> chosen;
  for (const EndpointTransport& transport : transports) {
    const auto interface = interfaces.find(transport.device);
    if (interface == interfaces.end()) {
      continue;
    }
    std::vector<std::string> addresses = interface->second.addresses;
    std::erase_if(addresses, isLinkLocal);
    const auto preferred = std::find_if(
        addresses.begin(), addresses.end(), [&](const auto& address) {
          return isIpv6(address) == preferIpv6;
        });
    if (preferred != addresses.end()) {
      chosen.push_back(*preferred);
    } else if (!addresses.empty()) {
      chosen.push_back(addresses.front());
    }
  }
  return chosen;
}

} // namespace torch_rpc_ext::transport::ucx
