#pragma once

#include "agent/codec.h"
#include "agent/executor.h"

#include <memory>

namespace torch_rpc_ext::agent {

// Takes what the bulk of `encoded` points into, to be held until send()'s
// callback has fired; not the head and the bulk themselves. Null if there is
// nothing to hold.
//
// What is held is released on a thread of the pool, whichever thread drops the
// last reference, unless it is clear that this needs no GIL. The last reference
// to a tensor may go with it, and to free memory that belongs to Python wants
// the GIL. The thread that serves the network must not wait for the GIL: nobody
// would serve the network meanwhile. Nor must a thread wait for the GIL that
// runs the deferred tasks of others while torch holds a lock.
//
// The executor outlives what is held.
std::shared_ptr<Encoded> hold(Encoded& encoded, Executor& executor);

} // namespace torch_rpc_ext::agent
