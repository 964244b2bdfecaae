#pragma once

#include "base/buffer.h"
#include "wire/call_frame.h"

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <unordered_map>

// For float32 tensors that travel as bfloat16 or float16: the choice of the
// dtype, and the conversion on the CPU.
namespace torch_rpc_ext::agent {

// The dtype that the user of this worker has chosen for each other worker, both
// for requests to that worker and for answers to it. An entry in `workers` wins
// over `others`.
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

// The dtype for the calls that this thread begins, and for their answers;
// nothing where WireDtypes decides.
std::optional<wire::WireDtype> callDtype();
// Returns the value before.
std::optional<wire::WireDtype> setCallDtype(
    std::optional<wire::WireDtype> dtype);

c10::ScalarType toTorch(wire::WireDtype dtype);

// Both convert as torch does: to the nearest number, ties to even. In float16,
// numbers from 65520 on become infinity, because they are nearer to 65536 than
// to 65504, the largest float16. `floats` has float32 and twice the size of
// `bytes`. Both may throw c10::Error.
void narrow(
    base::ConstSpan floats,
    wire::WireDtype dtype,
    base::MutableSpan bytes);
void widen(
    base::ConstSpan bytes,
    wire::WireDtype dtype,
    base::MutableSpan floats);

} // namespace torch_rpc_ext::agent
