// native.transport: sealed messages, and the states of a peer.

#include "native.h"
#include "transport/peer_state.h"
#include "transport/ucx/handshake.h"
#include "transport/ucx/peer_watch.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/secure_channel.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::native {

namespace py = pybind11;
using transport::ucx::SecureChannel;

namespace {

// A sealed message is (number, bytes).
py::tuple sealText(SecureChannel& channel, const std::string& text) {
  const auto sealed =
      unwrap(channel.seal(/*token=*/1, {}, {text.data(), text.size()}));
  return py::make_tuple(
      sealed.header.transfer, toBytes(sealed.data.data(), sealed.data.size()));
}

py::bytes
openText(SecureChannel& channel, uint64_t number, const std::string& bytes) {
  transport::ucx::FrameHeader outer;
  outer.kind = transport::ucx::FrameKind::kSealed;
  outer.token = 1;
  outer.transfer = number;
  const auto opened = unwrap(channel.open(outer, {bytes.data(), bytes.size()}));
  const base::ConstSpan data = opened.data();
  return toBytes(data.data, data.size);
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

void bindTransport(py::module_& parent) {
  py::module_ m = parent.def_submodule("transport");
  m.def("peer_states", &peerStates, py::arg("words"), py::arg("watched"));
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

} // namespace torch_rpc_ext::native
