#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>

namespace torch_rpc_ext::agent::device {

// A 1-D tensor over a part of a storage, on the host or on a device. Offset and
// size are in bytes, and multiples of the element's size.
at::Tensor viewOf(
    const c10::Storage& storage,
    size_t offset,
    size_t size,
    c10::ScalarType dtype);

// A tensor with any sizes and strides, which are in elements. The offset is in
// bytes.
at::Tensor viewOf(
    const c10::Storage& storage,
    size_t offset,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    c10::ScalarType dtype);

} // namespace torch_rpc_ext::agent::device
