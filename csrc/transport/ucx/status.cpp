#include "transport/ucx/status.h"

#include "base/boundary.h"
#include "base/log.h"

#include <ucs/debug/log_def.h>

#include <cstdio>
#include <mutex>

namespace torch_rpc_ext::transport::ucx {

base::Error toError(ucs_status_t status, const std::string& doing) {
  // UCX says "Endpoint timeout" also when a port refuses the connection, so its
  // own text would mislead.
  const std::string text = doing + ": " +
      (status == UCS_ERR_ENDPOINT_TIMEOUT
           ? "the other end has ended or does not answer"
           : ucs_status_string(status));
  switch (status) {
    case UCS_OK:
      return {};
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_TIMED_OUT: // the kernel has given up the socket
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_REJECTED:
    case UCS_ERR_IO_ERROR:
    case UCS_ERR_SHMEM_SEGMENT: // a dead peer's segment is gone
      return {base::ErrorKind::kPeerLost, text};
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_EXCEEDS_LIMIT:
      return {base::ErrorKind::kOverloaded, text};
    case UCS_ERR_CANCELED:
      return {base::ErrorKind::kShutDown, text};
    case UCS_ERR_INVALID_ADDR:
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_MESSAGE_TRUNCATED:
      return {base::ErrorKind::kInvalid, text};
    default:
      return {base::ErrorKind::kSystem, text};
  }
}

namespace {

ucs_log_func_rc_t onUcxLog(
    const char* /*file*/,
    unsigned /*line*/,
    const char* /*function*/,
    ucs_log_level_t level,
    const ucs_log_component_config_t* /*component*/,
    const char* message,
    va_list args) noexcept {
  if (level == UCS_LOG_LEVEL_FATAL || level == UCS_LOG_LEVEL_PRINT) {
    return UCS_LOG_FUNC_RC_CONTINUE; // UCX is about to abort and says why
  }
  char text[1024];
  vsnprintf(text, sizeof(text), message, args);
  // An event that UCX calls an error (a peer has closed its socket) reaches
  // users as the error of the calls that it affects, so UCX's line is only for
  // debugging.
  base::caughtHere(base::Boundary::kOperation, [&] {
    base::log(
        level <= UCS_LOG_LEVEL_WARN ? base::LogLevel::kInfo
                                    : base::LogLevel::kDebug,
        std::string("UCX: ") + text);
  });
  return UCS_LOG_FUNC_RC_STOP;
}

} // namespace

void captureUcxLog() {
  static std::once_flag once;
  std::call_once(once, [] { ucs_log_push_handler(onUcxLog); });
}

} // namespace torch_rpc_ext::transport::ucx
