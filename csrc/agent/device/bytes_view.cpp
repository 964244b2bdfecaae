#include "agent/device/bytes_view.h"

namespace torch_rpc_ext::agent::device {

at::Tensor viewOf(
    const c10::Storage& storage,
    size_t offset,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    c10::ScalarType dtype) {
  const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU
                                             : c10::DispatchKey::CUDA;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage),
      c10::DispatchKeySet(key),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides, static_cast<int64_t>(offset / c10::elementSize(dtype)));
  return tensor;
}

at::Tensor viewOf(
    const c10::Storage& storage,
    size_t offset,
    size_t size,
    c10::ScalarType dtype) {
  const int64_t sizes[] = {
      static_cast<int64_t>(size / c10::elementSize(dtype))};
  const int64_t strides[] = {1};
  return viewOf(storage, offset, sizes, strides, dtype);
}

} // namespace torch_rpc_ext::agent::device
