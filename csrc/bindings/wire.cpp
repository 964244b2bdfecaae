// _C.wire: the codec, the receive-buffer cache and other parts, for tests only.

#include "agent/codec.h"
#include "base/checksum.h"
#include "memory/buffer_cache.h"
#include "transport/ucx/peer_watch.h"
#include "transport/ucx/secure_channel.h"

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace rpc = torch::distributed::rpc;
using memory::BufferCache;

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
  BufferCache cache(0);
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

// A Block with a release() for Python, so that tests need not wait for the
// garbage collector.
struct PyBlock {
  std::optional<BufferCache::Block> block;

  BufferCache::Block& get() {
    if (!block) {
      throw py::value_error("the block has been released");
    }
    return *block;
  }
};

py::dict statsOf(const BufferCache& cache) {
  const auto stats = cache.stats();
  py::dict result;
  result["hits"] = stats.hits;
  result["misses"] = stats.misses;
  result["idle_bytes"] = stats.idleBytes;
  result["idle_blocks"] = stats.idleBlocks;
  result["used_bytes"] = stats.usedBytes;
  result["used_blocks"] = stats.usedBlocks;
  return result;
}

void bindBufferCache(py::module_& m) {
  py::class_<PyBlock>(m, "Block")
      .def_property_readonly(
          "address",
          [](PyBlock& self) {
            return reinterpret_cast<uintptr_t>(self.get().data());
          })
      .def_property_readonly(
          "size", [](PyBlock& self) { return self.get().size(); })
      .def_property_readonly(
          "capacity", [](PyBlock& self) { return self.get().capacity(); })
      .def_property_readonly(
          "region",
          [](PyBlock& self) {
            const auto& region = self.get().region();
            return py::make_tuple(region.id, region.fd);
          })
      .def("discard", [](PyBlock& self) { self.get().discard(); })
      .def(
          "release",
          [](PyBlock& self) { self.block.reset(); },
          py::call_guard<py::gil_scoped_release>());

  py::class_<BufferCache>(m, "BufferCache")
      .def(py::init<size_t>(), py::kw_only(), py::arg("max_idle_bytes"))
      .def(
          "acquire",
          [](BufferCache& self, size_t size) {
            auto result = self.acquire(size);
            return PyBlock{std::move(valueOf(result))};
          },
          py::arg("size"))
      .def("share", &BufferCache::share, py::arg("size"))
      .def(
          "trim",
          [](BufferCache& self, double seconds) {
            return self.trim(
                std::chrono::duration_cast<BufferCache::Clock::duration>(
                    std::chrono::duration<double>(seconds)));
          },
          py::arg("seconds"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "close",
          &BufferCache::close,
          py::call_guard<py::gil_scoped_release>())
      .def("stats", &statsOf);
}

using transport::ucx::SecureChannel;

// A sealed message is (number, bytes).
py::tuple sealText(SecureChannel& channel, const std::string& text) {
  auto sealed = channel.seal(/*token=*/1, {}, {text.data(), text.size()});
  const auto& data = valueOf(sealed).data;
  return py::make_tuple(
      sealed.value().header.transfer, toBytes(data.data(), data.size()));
}

py::bytes
openText(SecureChannel& channel, uint64_t number, const std::string& bytes) {
  transport::ucx::FrameHeader outer;
  outer.kind = transport::ucx::FrameKind::kSealed;
  outer.token = 1;
  outer.transfer = number;
  auto opened = channel.open(outer, {bytes.data(), bytes.size()});
  const base::ConstSpan data = valueOf(opened).data();
  return toBytes(data.data, data.size);
}

void bindSecureChannel(py::module_& m) {
  py::class_<SecureChannel>(m, "SecureChannel")
      .def(
          py::init([](const std::string& shared, bool opener) {
            return std::make_unique<SecureChannel>(
                transport::ucx::deriveKeys("key", {1, "P1", "P2"}, shared),
                opener);
          }),
          py::arg("shared"),
          py::arg("opener"))
      .def("seal", &sealText, py::arg("text"))
      .def("open", &openText, py::arg("number"), py::arg("bytes"));
}

// The states that a peer goes through when these words arrive one after the
// other.
std::vector<std::string> peerStates(
    const std::vector<std::string>& words,
    bool watched) {
  using transport::PeerState;
  using transport::ucx::PeerWord;
  PeerState state = PeerState::kConnecting;
  std::vector<std::string> states = {transport::toString(state)};
  for (const std::string& word : words) {
    uint8_t number = 0;
    while (word != transport::ucx::toString(PeerWord{number})) {
      if (++number == transport::ucx::kPeerWords) {
        throw py::value_error("there is no word \"" + word + "\"");
      }
    }
    state = transport::ucx::next(state, PeerWord{number}, watched);
    states.emplace_back(transport::toString(state));
  }
  return states;
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
  m.def(
      "checksum",
      [](const py::buffer& bytes) {
        const py::buffer_info info = bytes.request();
        py::gil_scoped_release release;
        return base::checksum(
            {info.ptr, static_cast<size_t>(info.size * info.itemsize)});
      },
      py::arg("bytes"));
  m.def("peer_states", &peerStates, py::arg("words"), py::arg("watched"));
  m.def("size_class", &memory::sizeClass, py::arg("size"));
  bindBufferCache(m);
  bindSecureChannel(m);
}

} // namespace torch_rpc_ext::bindings
