#pragma once

#include "agent/allow_list.h"
#include "agent/wire_dtype.h"
#include "transport/ucx/options.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent {

// Faults to inject into outgoing messages, by the name of their type. Empty in
// production.
struct FaultOptions {
  std::vector<std::string> messagesToFail;
  std::vector<std::string> messagesToLose; // with the connection, at this end
  std::vector<std::string> messagesToCorrupt; // one bit
  std::vector<std::string> messagesToForge; // bulk of the receiver's, it says
  std::unordered_map<std::string, double> messagesToDelay; // seconds
  int failures = 0; // of each message, one after the other

  bool any() const {
    return !messagesToFail.empty() || !messagesToLose.empty() ||
        !messagesToCorrupt.empty() || !messagesToForge.empty() ||
        !messagesToDelay.empty();
  }
};

// Upstream's options and calls give seconds.
inline std::chrono::milliseconds toMilliseconds(float seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// Validated in Python (torch_rpc_ext/options.py), where users build them.
struct AgentOptions {
  int numWorkerThreads = 16;
  float rpcTimeoutSeconds = 60;
  uint64_t receiveCacheBytes = uint64_t{4} << 30;
  double receiveCacheIdleSeconds = 30;
  // What requests that are not yet served may hold here; 0 for no limit.
  uint64_t receiveBudgetBytes = 0;
  // Storages up to this size travel inside the frame, larger ones as bulk.
  uint64_t inlineBytes = 16 << 10;
  // To each other worker; 0 for no limit.
  uint64_t maxCallsInFlight = 0;
  uint64_t maxBytesInFlight = 0;
  bool useCudaIpc = true;
  // What float32 tensors travel as.
  WireDtypes wireDtypes;
  // Whether checksums travel with all that this worker sends.
  bool integrity = false;
  transport::ucx::Options transport;
  AllowList allowed;
  FaultOptions faults;
};

} // namespace torch_rpc_ext::agent
