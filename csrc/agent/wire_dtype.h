#pragma once

#include "base/buffer.h"
#include "wire/call_frame.h"

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <unordered_map>

// float32 that travels as bfloat16 or float16: who wants it, and the
// conversion on the CPU.
namespace torch_rpc_ext::agent {

// What this worker's user has chosen for each other worker: for requests to it
// and for answers to it. A worker's own entry wins over `others`.
struct WireDtypes {
  wire::WireDtype others = wire::WireDtype::kFloat32;
  std::unordered_map<std::string, wire::WireDtype> workers;

  bool any() const {
    return others != wire::WireDtype::kFloat32 || !workers.empty();
  }
  wire::WireDtype of(const std::string& worker) const {
    const auto found = workers.find(worker);
    return found == workers.end() ? others : found->second;
  }
};

// What the calls that this thread begins shall have, and their answers; nothing
// to leave it to WireDtypes.
std::optional<wire::WireDtype> callDtype();
// Returns what it was before.
std::optional<wire::WireDtype> setCallDtype(
    std::optional<wire::WireDtype> dtype);

c10::ScalarType toTorch(wire::WireDtype dtype);

// As torch converts: to nearest, ties to even; a float16 has no number above
// 65504, and infinity instead. `floats` are float32 and take twice as much as
// `bytes`; both may throw c10::Error.
void narrow(
    base::ConstSpan floats,
    wire::WireDtype dtype,
    base::MutableSpan bytes);
void widen(
    base::ConstSpan bytes,
    wire::WireDtype dtype,
    base::MutableSpan floats);

} // namespace torch_rpc_ext::agent
