#pragma once

#include "base/error.h"
#include "wire/call_frame.h"

#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

namespace torch_rpc_ext::agent {

// In the text of every kCorrupted. Between processes an error of C++ is a text,
// so this is how the caller knows which class it is of.
inline constexpr const char* kChangedOnTheWay = "changed on its way";

// Compares what has arrived, on the host, with the sender's checksums: its
// payload, and the storages that do not travel beside the frame; `bulk` are
// those that came as bulk. Fails with kCorrupted, and names what has changed.
base::Error checkSums(
    const wire::CallFrameView& frame,
    base::ConstSpan payload,
    c10::ArrayRef<c10::Storage> bulk);

} // namespace torch_rpc_ext::agent
