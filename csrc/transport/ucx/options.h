#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// When a connection is encrypted.
enum class Encryption : uint8_t {
  kOff = 0,
  kBetweenHosts,
  kOn,
};

// All options of the UCX transport, as plain values: no UCX types here.
struct Options {
  // IP interfaces that TCP may use; empty means all. RDMA devices that UCX
  // finds are always allowed: where an RDMA device does not work, UCX chooses
  // another way by itself.
  std::vector<std::string> interfaces;
  // Whether the user named the interfaces by an option, which then counts more
  // than the variable UCX_NET_DEVICES.
  bool interfacesExplicit = false;
  std::pair<uint16_t, uint16_t> ports; // first and last TCP port; 0: any port
  bool preferIpv6 = false;
  bool useSharedMemory = true;
  bool useCma = true;
  double keepaliveSeconds = 2.0;
  Encryption encryption = Encryption::kOff;
  uint64_t maxFrameBytes = 0; // head plus bulk; 0: only memory limits
};

} // namespace torch_rpc_ext::transport::ucx
