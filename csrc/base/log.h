#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace torch_rpc_ext::base {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Writes one line to the sink (by default standard error, warnings and errors
// only). The agent's threads log without the GIL, so the sink must not need it.
void log(LogLevel level, const std::string& line);

// TORCH_RPC_EXT_LOG = debug | info | warning | error, read once.
LogLevel logThreshold();

// Lines that a stranger can cause: at most one a second, which says how many
// were left out.
// Thread: one at a time.
class LimitedLog {
 public:
  void operator()(LogLevel level, const std::string& line);

 private:
  std::chrono::steady_clock::time_point next_;
  uint64_t leftOut_ = 0;
};

} // namespace torch_rpc_ext::base
