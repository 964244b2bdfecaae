#include "agent/wrapped_message.h"

#include <cstdint>

namespace torch_rpc_ext::agent {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

namespace {

// Autograd, and around that a profiler.
constexpr int kMostWrappers = 2;

bool isWrapper(int type) {
  switch (type) {
    case MessageType::FORWARD_AUTOGRAD_REQ:
    case MessageType::FORWARD_AUTOGRAD_RESP:
    case MessageType::RUN_WITH_PROFILING_REQ:
    case MessageType::RUN_WITH_PROFILING_RESP:
      return true;
    default:
      return false;
  }
}

// `bytes` is the payload of the outer message: the inner payload, then a pickle
// of a tuple that begins with the inner message's type, then the pickle's size
// in 8 bytes. Returns that type, or 0 if there is none, and leaves the inner
// payload in `bytes`. Source: torch/csrc/distributed/rpc/utils.cpp,
// writeWrappedPayload().
int unwrap(std::string_view& bytes) {
  constexpr std::string_view kProtocol = "\x80\x02";
  constexpr char kMark = '('; // before a tuple of more than three
  constexpr char kBinInt2 = 'M';
  uint64_t size = 0;
  if (bytes.size() < sizeof(size)) {
    return 0;
  }
  for (const char c : bytes.substr(bytes.size() - sizeof(size))) {
    size = size << 8 | static_cast<unsigned char>(c);
  }
  bytes.remove_suffix(sizeof(size));
  if (size > bytes.size()) {
    return 0;
  }
  std::string_view added = bytes.substr(bytes.size() - size);
  bytes.remove_suffix(size);
  if (!added.starts_with(kProtocol)) {
    return 0;
  }
  added.remove_prefix(kProtocol.size());
  if (added.starts_with(kMark)) {
    added.remove_prefix(1);
  }
  if (added.size() < 3 || added.front() != kBinInt2) {
    return 0;
  }
  return static_cast<unsigned char>(added[1]) |
      static_cast<unsigned char>(added[2]) << 8;
}

InnerMessage whole(const Message& message) {
  const auto& payload = message.payload();
  return {message.type(), {payload.data(), payload.size()}};
}

} // namespace

InnerMessage innermost(const Message& message) {
  InnerMessage inner = whole(message);
  while (isWrapper(inner.type)) {
    const int type = unwrap(inner.bytes);
    if (type == 0) {
      break;
    }
    inner.type = type;
  }
  return inner;
}

base::Error checkWrappers(const Message& message) {
  InnerMessage inner = whole(message);
  for (int wrappers = 0; isWrapper(inner.type); ++wrappers) {
    inner.type = wrappers == kMostWrappers ? 0 : unwrap(inner.bytes);
    if (inner.type == 0) {
      return {
          base::ErrorKind::kInvalid,
          "call frame: the message is wrapped for autograd or for a profiler "
          "in "
          "a way that torch does not use"};
    }
  }
  return {};
}

} // namespace torch_rpc_ext::agent
