#pragma once

#include "agent/codec.h"
#include "agent/executor.h"

#include <memory>

namespace torch_rpc_ext::agent {

// Takes what the bulk of `encoded` points into, to be held until send()'s
// callback has fired; not the head and the bulk themselves. Null if there is
// nothing to hold.
//
// What is held is destroyed by the thread that drops the last reference, or, if
// that may need the GIL, on a thread of the pool: memory that belongs to Python
// may be freed then. A thread that serves the network must not wait for the
// GIL, because nobody would serve the network meanwhile. Nor must a thread that
// runs the deferred tasks of others, because torch may hold a lock there.
//
// The executor outlives what is held.
std::shared_ptr<Encoded> hold(Encoded& encoded, Executor& executor);

} // namespace torch_rpc_ext::agent
