#pragma once

#include <torch/csrc/distributed/rpc/message.h>

#include <cstdint>

namespace torch_rpc_ext::agent {

// Types of messages that upstream does not have. These two belong to the
// shutdown of a group (GroupShutdown).
inline constexpr uint16_t kBarrierRequestType =
    0x70 | torch::distributed::rpc::MessageTypeFlags::REQUEST_TYPE;
inline constexpr uint16_t kBarrierResponseType =
    0x70 | torch::distributed::rpc::MessageTypeFlags::RESPONSE_TYPE;

// This type and the next two are the messages of CUDA IPC (device::IpcMessage).
// They have no answer.
inline constexpr uint16_t kIpcType =
    0x71 | torch::distributed::rpc::MessageTypeFlags::REQUEST_TYPE;
constexpr bool isIpcType(uint16_t type) {
  return type >= kIpcType && type <= kIpcType + 2;
}

} // namespace torch_rpc_ext::agent
