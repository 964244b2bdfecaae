// _C.wire: the codec, for tests only. Tests bind what else they need in
// tests/support/native, but the codec is within this library.

#include "agent/codec.h"
#include "memory/buffer_cache.h"

#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace rpc = torch::distributed::rpc;

namespace {

template <typename T>
T& valueOf(base::Result<T>& result) {
  if (!result.ok()) {
    throw py::value_error(result.error().message);
  }
  return result.value();
}

py::bytes toBytes(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
}

py::tuple encodeMessage(
    const std::string& payload,
    std::vector<at::Tensor> tensors,
    int messageType,
    int64_t callId,
    uint64_t inlineThreshold,
    int dtype,
    bool checked) {
  auto message = c10::make_intrusive<rpc::Message>(
      std::vector<char>(payload.begin(), payload.end()),
      std::move(tensors),
      static_cast<rpc::MessageType>(messageType));
  auto result = agent::encode(
      message,
      {.callId = static_cast<uint64_t>(callId),
       .kind = wire::CallKind::kRequest,
       .inlineThreshold = inlineThreshold,
       .dtype = static_cast<wire::WireDtype>(dtype),
       .checked = checked});
  message.reset(); // tests that `Encoded` holds everything that it needs
  agent::Encoded& encoded = valueOf(result);
  py::list bulk;
  for (const auto& span : encoded.bulk) {
    bulk.append(toBytes(span.data, span.size));
  }
  return py::make_tuple(
      toBytes(encoded.head.data(), encoded.head.size()), std::move(bulk));
}

py::tuple decodeMessage(
    const std::string& head,
    const std::vector<std::string>& bulk) {
  auto parsed = agent::Decoder::parse({head.data(), head.size()});
  agent::Decoder& decoder = valueOf(parsed);
  std::vector<uint64_t> sizes;
  for (const auto& bytes : bulk) {
    sizes.push_back(bytes.size());
  }
  memory::BufferCache cache(0);
  auto allocated = decoder.allocate(cache, sizes, /*devices=*/{});
  const auto& spans = valueOf(allocated);
  for (size_t i = 0; i < spans.size() && i < bulk.size(); ++i) {
    std::memcpy(spans[i].data, bulk[i].data(), spans[i].size);
  }
  auto finished = decoder.finish();
  auto& message = valueOf(finished);
  return py::make_tuple(
      toBytes(message->payload().data(), message->payload().size()),
      message->tensors(),
      static_cast<int>(message->type()),
      message->id());
}

} // namespace

void bindWire(py::module_& parent) {
  py::module_ m = parent.def_submodule("wire", "For tests only.");
  m.def(
      "encode_message",
      &encodeMessage,
      py::arg("payload"),
      py::arg("tensors"),
      py::arg("message_type"),
      py::arg("call_id"),
      py::arg("inline_threshold"),
      py::arg("dtype") = 0,
      py::arg("checked") = false);
  m.def("decode_message", &decodeMessage, py::arg("head"), py::arg("bulk"));
}

} // namespace torch_rpc_ext::bindings
