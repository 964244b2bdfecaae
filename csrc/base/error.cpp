#include "base/error.h"

namespace torch_rpc_ext::base {

const char* toString(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kNone:
      return "none";
    case ErrorKind::kPeerLost:
      return "peer lost";
    case ErrorKind::kTimedOut:
      return "timed out";
    case ErrorKind::kRefused:
      return "refused";
    case ErrorKind::kOverloaded:
      return "overloaded";
    case ErrorKind::kShutDown:
      return "shut down";
    case ErrorKind::kInvalid:
      return "invalid";
    case ErrorKind::kSystem:
      return "system";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kCorrupted:
      return "corrupted";
    case ErrorKind::kNotInGroup:
      return "not in the group";
  }
  return "unknown";
}

} // namespace torch_rpc_ext::base
