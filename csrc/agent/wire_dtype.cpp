#include "agent/wire_dtype.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace torch_rpc_ext::agent {

namespace {

thread_local std::optional<wire::WireDtype> chosen;

at::Tensor overBytes(const void* data, size_t size, c10::ScalarType dtype) {
  return at::from_blob(
      const_cast<void*>(data),
      {static_cast<int64_t>(size / c10::elementSize(dtype))},
      at::TensorOptions(dtype));
}

} // namespace

std::optional<wire::WireDtype> callDtype() {
  return chosen;
}

std::optional<wire::WireDtype> setCallDtype(
    std::optional<wire::WireDtype> dtype) {
  return std::exchange(chosen, dtype);
}

c10::ScalarType toTorch(wire::WireDtype dtype) {
  switch (dtype) {
    case wire::WireDtype::kBfloat16:
      return c10::kBFloat16;
    case wire::WireDtype::kFloat16:
      return c10::kHalf;
    case wire::WireDtype::kFloat32:
      break;
  }
  return c10::kFloat;
}

void narrow(
    base::ConstSpan floats,
    wire::WireDtype dtype,
    base::MutableSpan bytes) {
  const c10::NoGradGuard noGrad;
  overBytes(bytes.data, bytes.size, toTorch(dtype))
      .copy_(overBytes(floats.data, floats.size, c10::kFloat));
}

void widen(
    base::ConstSpan bytes,
    wire::WireDtype dtype,
    base::MutableSpan floats) {
  const c10::NoGradGuard noGrad;
  overBytes(floats.data, floats.size, c10::kFloat)
      .copy_(overBytes(bytes.data, bytes.size, toTorch(dtype)));
}

} // namespace torch_rpc_ext::agent
