#pragma once

#include "base/synchronized.h"
#include "transport/transport.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

namespace torch_rpc_ext::agent {

// Puts RREF_USER_DELETE behind the requests that make RRefs. The caller of
// rpc.remote() may release the RRef before the function has returned. Its
// RREF_USER_DELETE then arrives before the RRef exists, upstream's RRefContext
// ignores it, the value stays for ever, and shutdown waits for the value. So
// the message is served after all requests of the same caller that arrived
// earlier and may make an RRef.
//
// Thread: any.
// Outlives: nothing, once stopped. (A Begun may be the last to hold a
//   Creations.)
class Creations : public std::enable_shared_from_this<Creations> {
 public:
  using Caller = const transport::Connection*;
  // Lives until a request has made its RRef, or it is clear that the request
  // makes none.
  using Begun = std::shared_ptr<void>;

  static std::shared_ptr<Creations> create();

  // To be called for the requests that may make an RRef, in the order of their
  // arrival.
  Begun begin(Caller caller);
  // Calls `then` when every Begun that this caller has so far is destroyed: at
  // once, or on the thread that destroys the last one. After stop(), never.
  void afterBegun(Caller caller, std::function<void()> then);
  void stop();

 private:
  struct Queue {
    uint64_t next = 0;
    std::set<uint64_t> begun; // and not ended
    // Each waits for the end of all requests with a lower number.
    std::deque<std::pair<uint64_t, std::function<void()>>> waiting;
  };
  struct State {
    std::unordered_map<Caller, Queue> queues;
    bool stopped = false;
  };

  Creations() = default;
  void end(Caller caller, uint64_t number);

  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::agent
