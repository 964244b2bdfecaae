#pragma once

#include "base/error.h"

#include <ucs/type/status.h>

#include <string>

namespace torch_rpc_ext::transport::ucx {

// The one place where a UCX status becomes an error kind.
base::Error toError(ucs_status_t status, const std::string& doing);

// Installs a UCX log handler that writes UCX's own lines through base/log, so
// that a peer that goes away is one line of ours, not five of UCX's.
void captureUcxLog();

} // namespace torch_rpc_ext::transport::ucx
