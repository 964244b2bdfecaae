#pragma once

#include "base/error.h"
#include "base/log.h"

#include <string>

namespace torch_rpc_ext::agent {

// The machine or the network does what nobody should have to look for.
inline void logDamage(const std::string& worker, const base::Error& error) {
  if (error.kind == base::ErrorKind::kCorrupted) {
    base::log(
        base::LogLevel::kWarning,
        "from worker \"" + worker + "\": " + error.message);
  }
}

} // namespace torch_rpc_ext::agent
