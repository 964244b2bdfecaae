#pragma once

#include "transport/transport.h"

#include <chrono>

namespace torch_rpc_ext::agent {

// A request that is being served, for its function, which may ask about it.
//
// Owns: a reference to the connection that the request came on.
// Thread: any.
struct ServedCall {
  using Clock = std::chrono::steady_clock;

  transport::ConnectionPtr connection;
  Clock::time_point deadline = Clock::time_point::max(); // of the caller
  // Its caller had given up before a thread took it: it is read, and does not
  // begin.
  bool isOnlyRead = false;

  // True when nobody waits for the answer any more.
  bool cancelled() const {
    return connection->closed() || Clock::now() >= deadline;
  }

  // That of this thread; null on a thread that serves none.
  static const ServedCall* current();

  // While it lives, `call` is that of this thread.
  class Scope {
   public:
    explicit Scope(const ServedCall& call);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const ServedCall* const before_;
  };
};

} // namespace torch_rpc_ext::agent
