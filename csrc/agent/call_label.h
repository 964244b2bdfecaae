#pragma once

#include "base/buffer.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torch_rpc_ext::agent {

// What a request asks for, for people: "module.function", "aten::add" or the
// kind of message. Only looks at the first bytes of the payload, because error
// texts must not cost anything on calls that succeed.
std::string labelOf(const torch::distributed::rpc::Message& message);

// Whether it calls what a user has written or named: a function, an operator.
// The others are upstream's own, for RRefs, backward passes and profiles.
bool isUserCall(torch::distributed::rpc::MessageType type);
// As far as its type tells; createsRRef() knows what is within.
bool mayCreateRRef(torch::distributed::rpc::MessageType type);

// Whether it is rpc.remote(), within distributed autograd and under a profiler
// too.
bool createsRRef(const torch::distributed::rpc::Message& message);

// Whether there may be RRefs in the payload of a call. Each is a fork that its
// receiver confirms when it reads the payload, and for which the sender keeps
// its own RRef until then.
bool mayHoldRRefs(base::ConstSpan payload);

// The RRef that a message to its owner is about: of a fetch, a new fork, or the
// end of one. Nothing for other messages.
std::optional<torch::distributed::rpc::RRefId> ownedRRef(
    const torch::distributed::rpc::Message& message);

// Payload and tensors.
uint64_t bytesOf(const torch::distributed::rpc::Message& message);

// "PYTHON_CALL", "RREF_USER_DELETE", ...: the names that upstream's fault
// injection knows; empty for a number that is no message type.
std::string nameOf(torch::distributed::rpc::MessageType type);

} // namespace torch_rpc_ext::agent
