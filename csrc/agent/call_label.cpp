#include "agent/call_label.h"

#include <algorithm>
#include <cctype>
#include <string_view>

namespace torch_rpc_ext::agent {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

namespace {

constexpr size_t kLookedAt = 512;

// The next string of a pickle of protocol 4 or 5 that is not longer than 255
// bytes; function and module names are such strings.
std::string_view takePickledString(std::string_view& bytes) {
  constexpr char kShortBinUnicode = '\x8c';
  const size_t at = bytes.find(kShortBinUnicode);
  if (at == std::string_view::npos || at + 1 >= bytes.size()) {
    return {};
  }
  const size_t length = static_cast<unsigned char>(bytes[at + 1]);
  if (at + 2 + length > bytes.size()) {
    return {};
  }
  const std::string_view text = bytes.substr(at + 2, length);
  bytes.remove_prefix(at + 2 + length);
  return text;
}

std::string pythonFunction(std::string_view bytes) {
  constexpr std::string_view kUdf = "PythonUDF";
  const size_t at = bytes.find(kUdf);
  if (at == std::string_view::npos) {
    return {};
  }
  bytes.remove_prefix(at + kUdf.size());
  const std::string_view module = takePickledString(bytes);
  const std::string_view name = takePickledString(bytes);
  if (module.empty() || name.empty()) {
    return {};
  }
  return std::string(module) + "." + std::string(name);
}

bool isNameCharacter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' ||
      c == '.' || c == ':';
}

// An operator ("aten::add") or a TorchScript function ("__torch__.f").
std::string scriptFunction(std::string_view bytes) {
  size_t at = bytes.find("::");
  if (at == std::string_view::npos) {
    at = bytes.find("__torch__");
  }
  if (at == std::string_view::npos) {
    return {};
  }
  size_t begin = at;
  size_t end = at;
  while (begin > 0 && isNameCharacter(bytes[begin - 1])) {
    --begin;
  }
  while (end < bytes.size() && isNameCharacter(bytes[end])) {
    ++end;
  }
  return std::string(bytes.substr(begin, end - begin));
}

// The kind of message inside of one that adds something to it, such as the
// context of autograd, or 0; takes what was added off `bytes`. It stands at the
// end, as a pickle that begins with the kind, then its size in 8 bytes.
// Source: torch/csrc/distributed/rpc/utils.cpp, writeWrappedPayload().
int unwrap(std::string_view& bytes) {
  // PROTO 2, MARK, BININT2
  constexpr std::string_view kBegin = "\x80\x02(M";
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
  const std::string_view added = bytes.substr(bytes.size() - size);
  bytes.remove_suffix(size);
  if (!added.starts_with(kBegin) || added.size() < kBegin.size() + 2) {
    return 0;
  }
  return static_cast<unsigned char>(added[kBegin.size()]) |
      static_cast<unsigned char>(added[kBegin.size() + 1]) << 8;
}

} // namespace

bool createsRRef(const Message& message) {
  int type = message.type();
  const auto& payload = message.payload();
  std::string_view bytes(payload.data(), payload.size());
  while (type == MessageType::FORWARD_AUTOGRAD_REQ ||
         type == MessageType::RUN_WITH_PROFILING_REQ) {
    type = unwrap(bytes);
  }
  return type == MessageType::PYTHON_REMOTE_CALL ||
      type == MessageType::SCRIPT_REMOTE_CALL;
}

std::string labelOf(const Message& message) {
  const auto& payload = message.payload();
  const std::string_view bytes(
      payload.data(), std::min(payload.size(), kLookedAt));
  std::string label = pythonFunction(bytes);
  if (label.empty()) {
    label = scriptFunction(bytes);
  }
  if (label.empty()) {
    label = nameOf(message.type());
  }
  return label;
}

std::string nameOf(MessageType type) {
  switch (type) {
#define TORCH_RPC_EXT_NAME(name) \
  case MessageType::name:        \
    return #name;
    TORCH_RPC_EXT_NAME(SCRIPT_CALL)
    TORCH_RPC_EXT_NAME(SCRIPT_RET)
    TORCH_RPC_EXT_NAME(PYTHON_CALL)
    TORCH_RPC_EXT_NAME(PYTHON_RET)
    TORCH_RPC_EXT_NAME(SCRIPT_REMOTE_CALL)
    TORCH_RPC_EXT_NAME(PYTHON_REMOTE_CALL)
    TORCH_RPC_EXT_NAME(REMOTE_RET)
    TORCH_RPC_EXT_NAME(SCRIPT_RREF_FETCH_CALL)
    TORCH_RPC_EXT_NAME(PYTHON_RREF_FETCH_CALL)
    TORCH_RPC_EXT_NAME(SCRIPT_RREF_FETCH_RET)
    TORCH_RPC_EXT_NAME(PYTHON_RREF_FETCH_RET)
    TORCH_RPC_EXT_NAME(RREF_USER_DELETE)
    TORCH_RPC_EXT_NAME(RREF_FORK_REQUEST)
    TORCH_RPC_EXT_NAME(RREF_CHILD_ACCEPT)
    TORCH_RPC_EXT_NAME(RREF_ACK)
    TORCH_RPC_EXT_NAME(FORWARD_AUTOGRAD_REQ)
    TORCH_RPC_EXT_NAME(FORWARD_AUTOGRAD_RESP)
    TORCH_RPC_EXT_NAME(BACKWARD_AUTOGRAD_REQ)
    TORCH_RPC_EXT_NAME(BACKWARD_AUTOGRAD_RESP)
    TORCH_RPC_EXT_NAME(CLEANUP_AUTOGRAD_CONTEXT_REQ)
    TORCH_RPC_EXT_NAME(CLEANUP_AUTOGRAD_CONTEXT_RESP)
    TORCH_RPC_EXT_NAME(RUN_WITH_PROFILING_REQ)
    TORCH_RPC_EXT_NAME(RUN_WITH_PROFILING_RESP)
    TORCH_RPC_EXT_NAME(RREF_BACKWARD_REQ)
    TORCH_RPC_EXT_NAME(RREF_BACKWARD_RESP)
    TORCH_RPC_EXT_NAME(EXCEPTION)
#undef TORCH_RPC_EXT_NAME
    default:
      return {};
  }
}

} // namespace torch_rpc_ext::agent
