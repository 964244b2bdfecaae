#pragma once

#include <exception>

namespace torch_rpc_ext::agent {

// The error of this thread's last rpc.remote() that failed before it was sent;
// null where none has. Upstream turns such an error into one of its own, which
// keeps only the text.
std::exception_ptr creationFailure();

// To be called before a further rpc.remote().
void forgetCreationFailure();

} // namespace torch_rpc_ext::agent
