#pragma once

#include "base/synchronized.h"
#include "transport/transport.h"

#include <torch/csrc/distributed/rpc/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

// Puts RREF_USER_DELETE behind the request that makes the RRef. The caller of
// rpc.remote() may release the RRef before the function has returned. Its
// RREF_USER_DELETE then arrives before the RRef exists, upstream's RRefContext
// ignores it, the value stays for ever, and shutdown waits for the value.
//
// Which RRef a request makes is known once the request has been read. So a
// deletion waits until all requests of the same caller that arrived earlier
// have been read, and then for the request that makes its RRef, if there is
// one. A function that runs for long holds up no other RRef's deletion.
//
// Thread: any.
// Outlives: nothing, once stopped. (A Begun may be the last to hold a
//   Creations.)
class Creations : public std::enable_shared_from_this<Creations> {
 public:
  using Caller = const transport::Connection*;
  using Id = torch::distributed::rpc::RRefId;

  // A request that may make an RRef, until it has made the RRef, or until it is
  // clear that the request makes none: then ended() is called, or the Begun is
  // destroyed.
  class Begun;

  static std::shared_ptr<Creations> create();

  // To be called for the requests that may make an RRef, and for the frames
  // that may turn out to be such requests, in the order of their arrival.
  std::shared_ptr<Begun> begin(Caller caller);
  // Calls `then` when the deletion of the RRef that `rref` returns may be
  // served: at once, or on the thread that has read or ended the last request
  // for which the deletion waits. After stop(), never. `rref` is called only if
  // the caller has such requests, and returns nothing if the message names no
  // RRef; then the message waits until the earlier requests have been read.
  void afterBegun(
      Caller caller,
      const std::function<std::optional<Id>()>& rref,
      std::function<void()> then);
  void stop();

 private:
  using Deletion = std::function<void()>;
  struct Waiting {
    uint64_t before; // waits until the requests with lower numbers are read
    std::optional<Id> rref;
    Deletion then;
  };
  // The requests of one caller, and the deletions that wait for them.
  struct Queue {
    uint64_t next = 0;
    std::set<uint64_t> unread;
    std::unordered_map<Id, std::vector<Deletion>, Id::Hash> making;
    std::deque<Waiting> waiting;
  };
  struct State {
    std::unordered_map<Caller, Queue> queues;
    bool stopped = false;
  };

  Creations() = default;
  void makes(Caller caller, uint64_t number, const Id& rref);
  void end(Caller caller, uint64_t number, const std::optional<Id>& rref);
  // Takes the deletions that no longer wait for a request to be read, and
  // appends those to `ready` that wait for nothing else.
  static void advance(Queue& queue, std::vector<Deletion>& ready);
  static void run(const std::vector<Deletion>& ready);

  base::Synchronized<State> state_;
};

// Thread: one at a time.
class Creations::Begun {
 public:
  Begun(std::shared_ptr<Creations> creations, Caller caller, uint64_t number)
      : creations_(std::move(creations)), caller_(caller), number_(number) {}
  ~Begun() {
    ended();
  }
  Begun(const Begun&) = delete;
  Begun& operator=(const Begun&) = delete;

  // The request has been read.
  void makes(const Id& rref);
  // The RRef exists, or never will. Does nothing after the first call.
  void ended();

 private:
  std::shared_ptr<Creations> creations_; // null once ended
  const Caller caller_;
  const uint64_t number_;
  std::optional<Id> rref_;
};

} // namespace torch_rpc_ext::agent
