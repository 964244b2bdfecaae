#pragma once

#include <cstddef>
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

// Everything the UCX transport can be told. Plain values: no UCX types here.
struct Options {
  // IP interfaces that TCP may use; empty means all. RDMA devices that UCX
  // finds are always allowed: they fall back by themselves.
  std::vector<std::string> interfaces;
  // The user named them to us, which counts more than UCX_NET_DEVICES.
  bool interfacesExplicit = false;
  std::pair<uint16_t, uint16_t> ports; // first and last; 0: any
  bool preferIpv6 = false;
  bool useSharedMemory = true;
  bool useCma = true;
  double keepaliveSeconds = 2.0;
  Encryption encryption = Encryption::kOff;
  uint64_t maxFrameBytes = 0; // head plus bulk; 0: no limit but memory
};

} // namespace torch_rpc_ext::transport::ucx
