#pragma once

#include "transport/transport.h"

#include <functional>
#include <memory>

namespace torch_rpc_ext::agent {

// The caller of a remote() may give the call up before the function has
// returned. Its message that nobody holds the RRef any more (RREF_USER_DELETE)
// then comes before the RRef exists, and upstream's RRefContext ignores it: the
// value stays for ever, and the end of the group waits for it. So that message
// is served after all requests that came before it, from the same worker, and
// that may make an RRef.
//
// Thread: any.
class Creations {
  class State;

 public:
  using Caller = const transport::Connection*;
  // Lives until a request has made its RRef, or will make none.
  using Begun = std::shared_ptr<void>;

  Creations();

  // In the order of arrival.
  Begun begin(Caller caller);
  // Calls `then` when no Begun lives that this caller has begun so far: at
  // once, or on the thread that destroys the last one. Or never, after stop().
  void afterThose(Caller caller, std::function<void()> then);
  void stop();

 private:
  const std::shared_ptr<State> state_;
};

} // namespace torch_rpc_ext::agent
