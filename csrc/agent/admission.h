#pragma once

#include "base/synchronized.h"
#include "transport/transport.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

// Decides whose tensors are received now, and whose stay with the caller for a
// while. A request holds room for its bytes from before they are fetched until
// a thread begins to serve the request; then the bytes belong to its function.
// Answers need no room: somebody waits for each of them.
//
// All callers share the budget; a request that is larger than the budget is
// received alone. One caller has room for one request, and for more requests
// only up to kAheadBytes or half of the budget, whichever is less: nothing is
// gained by fetching bytes long before a thread is free, and a caller that
// stands still must not keep the others out. The requests of a caller also wait
// while it has two or more answers, of more than kUntakenBytes together, still
// to take: such a caller asks faster than it takes, and its answers would fill
// the memory here. The callers take turns; the requests of one caller get room
// in the order of arrival.
//
// A request gives its room back before its function runs. So no function has to
// end for others to get room, and nested calls cannot block each other.
//
// Thread: any.
// Outlives: nothing, once stopped. (A Room or an Untaken may be the last to
//   hold an Admission.)
class Admission : public std::enable_shared_from_this<Admission> {
 public:
  static constexpr uint64_t kAheadBytes = uint64_t{64} << 20;
  static constexpr uint64_t kUntakenBytes = uint64_t{256} << 20;

  using Caller = const transport::Connection*;

  // Room for the bytes of a request. The destructor gives the room back, on any
  // thread.
  class Room {
   public:
    Room() = default;
    Room(Room&& other) noexcept = default;
    Room& operator=(Room&& other) noexcept {
      std::swap(from_, other.from_);
      std::swap(caller_, other.caller_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Room() {
      release();
    }
    uint64_t bytes() const {
      return from_ == nullptr ? 0 : bytes_;
    }
    void release();

   private:
    friend class Admission;
    Room(std::shared_ptr<Admission> from, Caller caller, uint64_t bytes)
        : from_(std::move(from)), caller_(caller), bytes_(bytes) {}

    std::shared_ptr<Admission> from_; // null: holds no room
    Caller caller_ = nullptr;
    uint64_t bytes_ = 0;
  };
  // Counts an answer as long as the Untaken lives: until the caller has taken
  // the answer.
  using Untaken = std::shared_ptr<void>;
  using Then = std::function<void(Room)>;

  // 0: the callers together have no limit. kAheadBytes still limits each of
  // them.
  static std::shared_ptr<Admission> create(uint64_t budget);

  // Calls `then` when there is room for `bytes`: at once, or later on the
  // thread that gives room back. forget() and stop() destroy `then` without a
  // call.
  void request(Caller caller, uint64_t bytes, Then then);
  // Enlarges `room` to `bytes`, even beyond the limits: for tensors that were
  // expected to be mapped and have to be copied after all.
  void grow(Room& room, Caller caller, uint64_t bytes);
  // Counts an answer whose `bytes` the caller has yet to fetch. The answer
  // itself does not wait for room.
  Untaken answering(Caller caller, uint64_t bytes);
  // The caller is gone: drops its requests that wait.
  void forget(Caller caller);
  void stop();

  struct Load {
    uint64_t heldBytes = 0; // of requests that have room
    uint64_t waitingBytes = 0;
    uint64_t waitingRequests = 0;
  };
  Load load() const;
  // The load of each caller that has room, or waits, or has answers to take.
  std::map<Caller, Load> byCaller() const;

 private:
  struct Waiting {
    uint64_t bytes;
    Then then;
  };
  struct Queue {
    std::deque<Waiting> waiting;
    Load load;
    uint64_t untakenBytes = 0;
    uint64_t untakenAnswers = 0;
  };
  using Queues = std::unordered_map<Caller, Queue>;
  using Admitted = std::pair<Room, Then>;
  struct State {
    Queues queues;
    std::deque<Caller> turns; // the callers whose requests wait
    Load total;
    bool stopped = false;
  };

  explicit Admission(uint64_t budget);
  void giveBack(Caller caller, uint64_t bytes);
  void taken(Caller caller, uint64_t bytes);
  static void eraseIfEmpty(State& state, Queues::iterator entry);
  static void drop(State& state, Queue& queue, std::deque<Waiting>& dropped);
  std::vector<Admitted> admit(State& state);
  static void run(std::vector<Admitted> admitted);

  const uint64_t budget_;
  // The most that one caller may hold with more than one request. A single
  // request may be larger.
  const uint64_t ahead_;
  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::agent
