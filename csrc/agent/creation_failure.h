#pragma once

#include <exception>

namespace torch_rpc_ext::agent {

// Why the last rpc.remote() of this thread failed before it was sent; null if
// it did not. Upstream makes an error of its own of it, which has nothing but
// the text.
std::exception_ptr creationFailure();

// To be called before a further rpc.remote().
void forgetCreationFailure();

} // namespace torch_rpc_ext::agent
