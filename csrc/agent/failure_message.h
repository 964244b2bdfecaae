#pragma once

#include "base/error.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_rpc_ext::agent {

// The type of the answer to a call that failed in this worker and not in the
// called function. Its payload is a text, as that of torch's EXCEPTION; the
// kind of the error is added to this type, and kUnread if the request was not
// read. An exception of the function is a plain EXCEPTION, so no text can pass
// for such a failure.
inline constexpr uint16_t kFailureType =
    0x80 | torch::distributed::rpc::MessageTypeFlags::RESPONSE_TYPE;
inline constexpr uint16_t kUnread = 0x10;
static_assert(static_cast<uint16_t>(base::ErrorKind::kCorrupted) < kUnread);

// Whether the callee has read the request. If not, the caller releases the
// RRefs in the request.
enum class Read : uint8_t { kYes, kNo };

inline c10::intrusive_ptr<torch::distributed::rpc::Message> makeFailure(
    base::ErrorKind kind,
    const std::string& text,
    Read read = Read::kYes) {
  return c10::make_intrusive<torch::distributed::rpc::Message>(
      std::vector<char>(text.begin(), text.end()),
      std::vector<at::Tensor>{},
      static_cast<torch::distributed::rpc::MessageType>(
          kFailureType + static_cast<uint16_t>(kind) +
          (read == Read::kNo ? kUnread : 0)));
}

struct Failure {
  base::ErrorKind kind;
  Read read;
};

// `type` is that of a message. Nothing where the message is no such answer.
inline std::optional<Failure> failureIn(int type) {
  int kind = type - kFailureType;
  const Read read = kind > kUnread ? Read::kNo : Read::kYes;
  kind -= read == Read::kNo ? kUnread : 0;
  if (kind <= static_cast<int>(base::ErrorKind::kNone) ||
      kind > static_cast<int>(base::ErrorKind::kCorrupted)) {
    return std::nullopt;
  }
  return Failure{static_cast<base::ErrorKind>(kind), read};
}

} // namespace torch_rpc_ext::agent
