#include "agent/call_label.h"

#include "agent/wrapped_message.h"

#include <torch/csrc/distributed/rpc/python_remote_call.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;
using torch::distributed::rpc::RRefId;

namespace {

constexpr size_t kLookedAt = 512;

// The next string of up to 255 bytes in a pickle of protocol 4 or 5. Names of
// functions and modules are such strings.
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

std::string takeName(std::string_view& bytes) {
  const std::string_view module = takePickledString(bytes);
  const std::string_view name = takePickledString(bytes);
  if (module.empty() || name.empty()) {
    return {};
  }
  return std::string(module) + "." + std::string(name);
}

// Functions of this package that a request calls in order to call the function
// of the user.
bool isBeforeFunction(std::string_view name) {
  return name == "torch_rpc_ext.aio._server.run" ||
      name == "torch_rpc_ext.aio._batch.enqueue";
}

// The text up to the next zero byte; takes both off `bytes`.
std::string_view takeTerminated(std::string_view& bytes) {
  const size_t end = bytes.find('\0');
  if (end == std::string_view::npos) {
    return {};
  }
  const std::string_view text = bytes.substr(0, end);
  bytes.remove_prefix(end + 1);
  return text;
}

// The function that the short form of a payload names.
// torch_rpc_ext/_upstream/payloads.py writes that form for calls whose
// arguments are all tensors.
std::string shortFunction(std::string_view bytes) {
  constexpr std::string_view kCall("\001Call\0", 6);
  const size_t at = bytes.find(kCall);
  if (at == std::string_view::npos) {
    return {};
  }
  bytes.remove_prefix(at + kCall.size());
  const std::string_view module = takeTerminated(bytes);
  const std::string_view name = takeTerminated(bytes);
  return name.empty() ? std::string()
                      : std::string(module) + "." + std::string(name);
}

std::string pythonFunction(std::string_view bytes) {
  constexpr std::string_view kUdf = "PythonUDF";
  // The function's name follows this one (torch_rpc_ext/profiler/recorder.py).
  constexpr std::string_view kTraced = "torch_rpc_ext.profiler.recorder.Traced";
  const size_t at = bytes.find(kUdf);
  if (at == std::string_view::npos) {
    return {};
  }
  bytes.remove_prefix(at + kUdf.size());
  std::string name = takeName(bytes);
  if (name == kTraced) {
    return std::string(takePickledString(bytes));
  }
  if (isBeforeFunction(name)) {
    std::string function = takeName(bytes);
    return function.empty() ? name : function;
  }
  return name;
}

bool isNameCharacter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' ||
      c == '.' || c == ':';
}

// Length of the string that begins at `begin`: torch's pickles write 'X' and
// the length, in 4 bytes, before a string. If these are missing, bytes.size(),
// which cuts no name short.
size_t pickledLength(std::string_view bytes, size_t begin) {
  constexpr size_t kSize = 4;
  if (begin < kSize + 1 || bytes[begin - kSize - 1] != 'X') {
    return bytes.size();
  }
  size_t length = 0;
  for (size_t i = 1; i <= kSize; ++i) {
    length = length << 8 | static_cast<unsigned char>(bytes[begin - i]);
  }
  return length;
}

// An operator ("aten::add") or a TorchScript function ("module.f").
std::string scriptFunction(std::string_view bytes) {
  constexpr std::string_view kRoot = "__torch__.";
  size_t at = bytes.find("::");
  if (at == std::string_view::npos) {
    at = bytes.find(kRoot);
  }
  if (at == std::string_view::npos) {
    return {};
  }
  size_t begin = at;
  while (begin > 0 && isNameCharacter(bytes[begin - 1])) {
    --begin;
  }
  const size_t most =
      begin + std::min(pickledLength(bytes, begin), bytes.size() - begin);
  size_t end = at;
  while (end < most && isNameCharacter(bytes[end])) {
    ++end;
  }
  std::string_view name = bytes.substr(begin, end - begin);
  if (name.starts_with(kRoot)) {
    name.remove_prefix(kRoot.size());
  }
  return std::string(name);
}

c10::intrusive_ptr<Message> asMessage(
    const InnerMessage& inner,
    std::vector<at::Tensor> tensors = {}) {
  return c10::make_intrusive<Message>(
      std::vector<char>(inner.bytes.begin(), inner.bytes.end()),
      std::move(tensors),
      static_cast<MessageType>(inner.type));
}

} // namespace

bool endsAnother(std::string_view label) {
  return label == "torch_rpc_ext.aio._server.cancel";
}

bool isUserCall(MessageType type) {
  switch (type) {
    case MessageType::SCRIPT_CALL:
    case MessageType::PYTHON_CALL:
    case MessageType::SCRIPT_REMOTE_CALL:
    case MessageType::PYTHON_REMOTE_CALL:
    case MessageType::FORWARD_AUTOGRAD_REQ:
    case MessageType::RUN_WITH_PROFILING_REQ:
      return true;
    default:
      return false;
  }
}

bool mayCreateRRef(MessageType type) {
  return isUserCall(type) && type != MessageType::SCRIPT_CALL &&
      type != MessageType::PYTHON_CALL;
}

bool mayHoldRRefs(base::ConstSpan payload) {
  // A pickle with an RRef names the function that rebuilds it:
  // _py_rref_receiver in Python's pickles, torch.distributed.rpc.rref in
  // TorchScript's.
  const std::string_view text(
      static_cast<const char*>(payload.data), payload.size);
  return text.find("rref") != text.npos || text.find("RRef") != text.npos;
}

std::unique_ptr<std::string> payloadWithRRefs(const Message& message) {
  using torch::distributed::rpc::PythonRemoteCall;
  using torch::distributed::rpc::PythonRRefFetchRet;
  using torch::distributed::rpc::SerializedPyObj;
  const auto& payload = message.payload();
  const bool isAnswer = message.type() == MessageType::PYTHON_RET ||
      message.type() == MessageType::SCRIPT_RET ||
      message.type() == MessageType::PYTHON_RREF_FETCH_RET ||
      message.type() == MessageType::SCRIPT_RREF_FETCH_RET ||
      message.type() == MessageType::FORWARD_AUTOGRAD_RESP ||
      message.type() == MessageType::RUN_WITH_PROFILING_RESP;
  if (!(isUserCall(message.type()) || isAnswer) ||
      !mayHoldRRefs({payload.data(), payload.size()})) {
    return nullptr;
  }
  const auto inner = innermost(message);
  switch (inner.type) {
    case MessageType::PYTHON_CALL:
      // The first byte says whether the call is asynchronous.
      return std::make_unique<std::string>(inner.bytes.substr(1));
    // These two are a pickle of torch's, with the one of Python's as a text.
    case MessageType::PYTHON_RREF_FETCH_RET: {
      const auto fetched =
          PythonRRefFetchRet::fromMessage(*asMessage(inner, message.tensors()));
      return std::make_unique<std::string>(
          SerializedPyObj::fromIValues(fetched->values()).payload_);
    }
    case MessageType::PYTHON_REMOTE_CALL: {
      const auto call =
          PythonRemoteCall::fromMessage(*asMessage(inner, message.tensors()));
      return std::make_unique<std::string>(
          static_cast<PythonRemoteCall&>(*call).serializedPyObj().payload_);
    }
    default:
      return std::make_unique<std::string>(inner.bytes);
  }
}

bool createsRRef(const Message& message) {
  const int type = innermost(message).type;
  return type == MessageType::PYTHON_REMOTE_CALL ||
      type == MessageType::SCRIPT_REMOTE_CALL;
}

std::optional<RRefId> ownedRRef(const Message& message) {
  using namespace torch::distributed::rpc;
  const auto inner = innermost(message);
  switch (inner.type) {
    case MessageType::PYTHON_RREF_FETCH_CALL:
      return PythonRRefFetchCall::fromMessage(*asMessage(inner))->rrefId();
    case MessageType::SCRIPT_RREF_FETCH_CALL:
      return ScriptRRefFetchCall::fromMessage(*asMessage(inner))->rrefId();
    case MessageType::RREF_FORK_REQUEST:
      return RRefForkRequest::fromMessage(*asMessage(inner))->rrefId();
    case MessageType::RREF_USER_DELETE:
      return RRefUserDelete::fromMessage(*asMessage(inner))->rrefId();
    default:
      return std::nullopt;
  }
}

std::string labelOf(const Message& message) {
  const auto& payload = message.payload();
  const std::string_view bytes(
      payload.data(), std::min(payload.size(), kLookedAt));
  std::string label = shortFunction(bytes);
  if (label.empty()) {
    label = pythonFunction(bytes);
  }
  if (label.empty()) {
    label = scriptFunction(bytes);
  }
  if (label.empty()) {
    label = nameOf(static_cast<MessageType>(innermost(message).type));
  }
  return label;
}

uint64_t bytesOf(const Message& message) {
  uint64_t bytes = message.payload().size();
  for (const auto& tensor : message.tensors()) {
    const bool hasBytes = tensor.has_storage() && !tensor.is_meta();
    bytes += hasBytes ? tensor.storage().nbytes() : 0;
  }
  return bytes;
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
