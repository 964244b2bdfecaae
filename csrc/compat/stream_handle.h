#pragma once

// The driver's handle of a torch stream, for 2.11 <= torch < 3.

#include <c10/core/Stream.h>

#include <exception>
#include <optional>

namespace torch_rpc_ext::compat {

// A CUstream, or std::nullopt where this version of torch or the stream's kind
// of device does not offer the handle.
template <typename Stream = c10::Stream>
std::optional<void*> nativeHandle(const Stream& stream) {
  try {
    if constexpr (requires { stream.native_handle(); }) {
      return stream.native_handle();
    } else if constexpr (requires { stream.stream_handle(); }) { // its new name
      return stream.stream_handle();
    }
  } catch (const std::exception&) {
  }
  return std::nullopt;
}

} // namespace torch_rpc_ext::compat
