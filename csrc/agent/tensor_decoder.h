#pragma once

#include "base/error.h"
#include "wire/call_frame.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <vector>

namespace torch_rpc_ext::agent {

// Builds the tensors that a call frame describes over `storages` (those of its
// storage table). The indices of a sparse tensor are checked on the CPU:
// `onHost` has the bytes of `storages` there, and is empty if all storages are
// on the CPU. A storage whose bytes came beside the frame has no bytes in
// `onHost`; if the sender `isTrusted`, the indices in that storage are taken
// unchecked, else the call fails when a sparse tensor uses the storage. Part of
// codec.h. Fails with kInvalid; may throw c10::Error.
base::Error decodeTensors(
    const wire::CallFrameView& frame,
    c10::ArrayRef<c10::Storage> storages,
    c10::ArrayRef<c10::Storage> onHost,
    bool isTrusted,
    std::vector<at::Tensor>& tensors);

} // namespace torch_rpc_ext::agent
