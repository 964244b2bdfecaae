#pragma once

#include "transport/transport.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

namespace torch_rpc_ext::agent {

// Which requests are received now, and which leave their tensors with their
// callers for a while. A request needs room for its bytes from when they are
// fetched until a thread begins to serve it; from then on they are its
// function's. Answers need none: somebody waits for each.
//
// All callers together have the budget; a request that is larger has it alone.
// Each caller has kAheadBytes of it, or half, or one request: more that is
// fetched before a thread is free would only fill cold memory, and one caller
// that stands still must not keep the others out. A caller that has not taken
// kUntakenBytes of answers, in two or more, waits too: it asks faster than it
// takes, and the answers would fill the memory here. Who waits gets room in
// the order of arrival, the callers in turn.
//
// Nobody waits while threads are free, nested calls or not: what has room is
// fetched and served, and then there is room for the next one.
//
// Thread: any.
class Admission {
  class State;

 public:
  static constexpr uint64_t kAheadBytes = uint64_t{64} << 20;
  static constexpr uint64_t kUntakenBytes = uint64_t{256} << 20;

  using Caller = const transport::Connection*;

  // Given back when it is destroyed, on any thread.
  class Room {
   public:
    Room() = default;
    Room(Room&& other) noexcept = default;
    Room& operator=(Room&& other) noexcept {
      std::swap(state_, other.state_);
      std::swap(caller_, other.caller_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Room() {
      release();
    }
    void release();
    uint64_t bytes() const {
      return state_ == nullptr ? 0 : bytes_;
    }

   private:
    friend class Admission;
    Room(std::shared_ptr<State> state, Caller caller, uint64_t bytes)
        : state_(std::move(state)), caller_(caller), bytes_(bytes) {}

    std::shared_ptr<State> state_; // null: none
    Caller caller_ = nullptr;
    uint64_t bytes_ = 0;
  };
  // Lives until the caller has taken an answer.
  using Untaken = std::shared_ptr<void>;
  using Then = std::function<void(Room)>;

  // 0: no budget.
  explicit Admission(uint64_t budget);

  // Calls `then` when there is room for `bytes`: at once, or later on the
  // thread that gives room back. Or never, after forget() or stop(), which
  // destroy it.
  void request(Caller caller, uint64_t bytes, Then then);
  // Has `room` be `bytes` at least, whether there is so much or not: for
  // tensors that were thought to be mapped, and have to be copied.
  void grow(Room& room, Caller caller, uint64_t bytes);
  // An answer whose `bytes` its receiver fetches. It need not wait itself.
  Untaken answering(Caller caller, uint64_t bytes);
  // The caller is gone: so are its requests that wait.
  void forget(Caller caller);
  void stop();

  struct Load {
    uint64_t heldBytes = 0; // that have room
    uint64_t waitingBytes = 0;
    uint64_t waitingRequests = 0;
  };
  Load load() const;
  // Of each that has something here.
  std::map<Caller, Load> byCaller() const;

 private:
  const std::shared_ptr<State> state_;
};

} // namespace torch_rpc_ext::agent
