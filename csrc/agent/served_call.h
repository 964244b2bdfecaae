#pragma once

#include "agent/creations.h"
#include "transport/transport.h"

#include <chrono>
#include <cstdint>
#include <memory>

namespace torch_rpc_ext::agent {

// The request that a thread serves, for its function to ask about.
//
// Owns: references to the connection that the request came on, and to the
//   Begun of a request that makes an RRef.
// Thread: any.
struct ServedCall {
  using Clock = std::chrono::steady_clock;

  transport::ConnectionPtr connection;
  // When the caller stops waiting.
  Clock::time_point deadline = Clock::time_point::max();
  // The caller had given up before a thread took the request: the request is
  // read, and its function is not called.
  bool isOnlyRead = false;
  // What this worker has received for the request. Not what its caller lends.
  uint64_t bytes = 0;
  // Null where the request makes no RRef.
  std::shared_ptr<Creations::Begun> creation = nullptr;

  // Whether the caller no longer waits for the answer.
  bool cancelled() const {
    return connection->closed() || Clock::now() >= deadline;
  }

  // The request that this thread serves; null where it serves none.
  static const ServedCall* current();

  // While a Scope lives, current() is `call`.
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
