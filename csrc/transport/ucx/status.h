#pragma once

#include "base/error.h"

#include <ucs/type/status.h>

#include <string>

namespace torch_rpc_ext::transport::ucx {

// The one place where a UCX status becomes an error kind.
base::Error toError(ucs_status_t status, const std::string& doing);

// Installs a UCX log handler that passes UCX's own lines to base/log at a low
// level. So a peer that goes away causes one line of this library, and not five
// of UCX.
void captureUcxLog();

} // namespace torch_rpc_ext::transport::ucx
