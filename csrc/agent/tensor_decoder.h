#pragma once

#include "base/error.h"
#include "wire/call_frame.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <vector>

namespace torch_rpc_ext::agent {

// Builds the tensors that a call frame describes over `storages` (those of its
// storage table). `onHost` is empty if all are on the CPU; else it has the same
// bytes on the CPU, where a peer sent them, to be checked there. What came
// beside the frame has none there: that is taken unchecked if it `isTrusted`,
// else it may be no part of a sparse tensor. Part of codec.h. Fails with
// kInvalid; may throw c10::Error.
base::Error decodeTensors(
    const wire::CallFrameView& frame,
    c10::ArrayRef<c10::Storage> storages,
    c10::ArrayRef<c10::Storage> onHost,
    bool isTrusted,
    std::vector<at::Tensor>& tensors);

} // namespace torch_rpc_ext::agent
