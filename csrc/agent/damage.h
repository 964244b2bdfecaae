#pragma once

#include "base/error.h"
#include "base/log.h"

#include <string>

namespace torch_rpc_ext::agent {

// Logs bytes that changed on their way: a broken machine or network, which
// should show up in the log and not only in the error of one call.
inline void logDamage(const std::string& worker, const base::Error& error) {
  if (error.kind == base::ErrorKind::kCorrupted) {
    base::log(
        base::LogLevel::kWarning,
        "from worker \"" + worker + "\": " + error.message);
  }
}

} // namespace torch_rpc_ext::agent
