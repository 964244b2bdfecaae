#pragma once

#include <string>

namespace torch_rpc_ext::base {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Writes one line to the sink (by default standard error, warnings and errors
// only). The agent's threads log without the GIL, so the sink must not need it.
void log(LogLevel level, const std::string& line);

// TORCH_RPC_EXT_LOG = debug | info | warning | error, read once.
LogLevel logThreshold();

} // namespace torch_rpc_ext::base
