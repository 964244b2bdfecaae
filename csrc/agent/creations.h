#pragma once

#include "transport/transport.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace torch_rpc_ext::agent {

// Who calls remote(), and gives up before the function has returned, lets go
// of an RRef that is not there yet. Upstream's RRefContext does not remember
// that: it keeps the value for ever, and the end of the group waits for it. So
// what lets go of an RRef is served after the requests of the same worker that
// came earlier and may make it.
//
// Thread: any.
class Creations {
  class State;

 public:
  using Caller = const transport::Connection*;

  // A request that may make an RRef, until it has, or will not.
  class Begun {
   public:
    Begun() = default;
    Begun(Begun&& other) noexcept = default;
    Begun& operator=(Begun&& other) noexcept {
      std::swap(state_, other.state_);
      std::swap(caller_, other.caller_);
      std::swap(number_, other.number_);
      return *this;
    }
    ~Begun() {
      end();
    }
    void end();

   private:
    friend class Creations;
    Begun(std::shared_ptr<State> state, Caller caller, uint64_t number)
        : state_(std::move(state)), caller_(caller), number_(number) {}

    std::shared_ptr<State> state_; // null: none
    Caller caller_ = nullptr;
    uint64_t number_ = 0;
  };

  Creations();

  // In the order of arrival.
  Begun begin(Caller caller);
  // Calls `then` when all have ended that this caller has begun so far: at
  // once, or on the thread that ends the last. Or never, after stop().
  void afterThose(Caller caller, std::function<void()> then);
  void stop();

 private:
  const std::shared_ptr<State> state_;
};

} // namespace torch_rpc_ext::agent
