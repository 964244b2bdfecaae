#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace torch_rpc_ext::base {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Writes one line to standard error, unless its level is below the level in the
// environment variable TORCH_RPC_EXT_LOG = debug | info | warning (default) |
// error, which is read once.
void log(LogLevel level, const std::string& line);

// For lines that a stranger can cause: writes at most one line a second, which
// says how many lines were left out before it.
// Thread: one at a time.
class LimitedLog {
 public:
  void operator()(LogLevel level, const std::string& line);

 private:
  std::chrono::steady_clock::time_point next_;
  uint64_t leftOut_ = 0;
};

} // namespace torch_rpc_ext::base
