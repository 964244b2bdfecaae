#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>

namespace torch_rpc_ext::agent::device {

// A tensor of bytes over a part of a storage, on the host or on a device.
at::Tensor bytesOf(const c10::Storage& storage, size_t offset, size_t size);

} // namespace torch_rpc_ext::agent::device
