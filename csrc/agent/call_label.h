#pragma once

#include "base/buffer.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace torch_rpc_ext::agent {

// What a request asks for, in words for error texts and logs:
// "module.function", "aten::add" or the type of message. Looks only at the
// first bytes of the payload, because calls that succeed must not pay for error
// texts.
std::string labelOf(const torch::distributed::rpc::Message& message);

// Whether a call with this label cancels another call, as those of
// torch_rpc_ext.aio do. No limit may hold such a call back.
bool endsAnother(std::string_view label);

// Whether messages of this type call a function or an operator that a user
// chose. Upstream uses the other types itself, for RRefs, backward passes and
// profiles.
bool isUserCall(torch::distributed::rpc::MessageType type);
// Whether messages of this type can be a rpc.remote(), possibly wrapped in
// another message; createsRRef() looks inside.
bool mayCreateRRef(torch::distributed::rpc::MessageType type);

// Whether the message is a rpc.remote(), even where distributed autograd or a
// profiler has wrapped it.
bool createsRRef(const torch::distributed::rpc::Message& message);

// Whether the payload of a call may contain RRefs. The receiver confirms each
// RRef when it reads the payload; until then the sender keeps its own RRef
// alive.
bool mayHoldRRefs(base::ConstSpan payload);

// The pickle in the message that may hold RRefs; null for a message that holds
// none, and for one of upstream's own protocol.
std::unique_ptr<std::string> payloadWithRRefs(
    const torch::distributed::rpc::Message& message);

// The RRef that a message to its owner fetches, forks or releases. Nothing for
// other messages.
std::optional<torch::distributed::rpc::RRefId> ownedRRef(
    const torch::distributed::rpc::Message& message);

// Bytes of the payload and the tensors.
uint64_t bytesOf(const torch::distributed::rpc::Message& message);

// "PYTHON_CALL", "RREF_USER_DELETE", ...: the names that upstream's fault
// injection uses. Empty where the number is not one of upstream's message
// types.
std::string nameOf(torch::distributed::rpc::MessageType type);

} // namespace torch_rpc_ext::agent
