#pragma once

#include "transport/transport.h"

#include <functional>
#include <memory>

namespace torch_rpc_ext::agent {

// Puts RREF_USER_DELETE behind the requests that make RRefs. The caller of
// rpc.remote() may release the RRef before the function has returned. Its
// RREF_USER_DELETE then arrives before the RRef exists, upstream's RRefContext
// ignores it, the value stays for ever, and shutdown waits for it. So that
// message is served after all requests of the same caller that arrived earlier
// and may make an RRef.
//
// Thread: any.
class Creations {
  class State;

 public:
  using Caller = const transport::Connection*;
  // Lives until a request has made its RRef, or it is clear that the request
  // makes none.
  using Begun = std::shared_ptr<void>;

  Creations();

  // To be called for such requests in the order of their arrival.
  Begun begin(Caller caller);
  // Calls `then` when every Begun that this caller has so far is destroyed: at
  // once, or on the thread that destroys the last one. After stop(), never.
  void afterThose(Caller caller, std::function<void()> then);
  void stop();

 private:
  const std::shared_ptr<State> state_;
};

} // namespace torch_rpc_ext::agent
