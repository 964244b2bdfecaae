#pragma once

#include "base/synchronized.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

namespace torch_rpc_ext::agent {

// Events of the other workers of the group, for users who ask; the events of
// one worker come in their order. There are two sources, the list of members
// and the connections: where both report the same departure, there is one
// event.
//
// Owns: the state of each worker, and the events that nobody has taken yet.
// Thread: any.
class WorkerEvents {
 public:
  enum class Kind { kJoined, kReturned, kLost, kLeft, kBegan, kEnded };
  struct Event {
    Kind kind = Kind::kEnded;
    std::string worker = {};
    std::string reason = {};
  };

  // `worker` is a member now, in life `life` (Hello::life).
  void added(const std::string& worker, uint32_t life);
  // `worker` is no longer a member.
  void removed(const std::string& worker);
  // The last connection to `worker` has ended; `left`: the worker ended it
  // itself.
  void unreachable(const std::string& worker, bool left, std::string reason);
  // `worker` has connected to this one, or answered it.
  void heardOf(const std::string& worker);
  // The group shuts down: all workers leave, so a departure is no event from
  // here on.
  void groupEnds();

  // Keeps events from here on. The first call begins with an event for each
  // worker that is already lost. Every call adds kBegan.
  void begin();
  // The next event; nothing if none comes within `patience`. After end(), when
  // all events have been taken, always kEnded.
  std::optional<Event> next(std::chrono::milliseconds patience);
  void end();

 private:
  struct WorkerState {
    uint32_t life = 0;
    Kind last = Kind::kJoined;
    std::string reason = {};
  };
  using Workers = std::map<std::string, WorkerState>;
  struct State {
    Workers workers;
    std::deque<Event> events;
    bool kept = false;
    bool groupEnds = false;
    bool ended = false;
  };

  static bool isGone(const WorkerState& worker);
  void push(State&, Workers::value_type& worker, Kind, std::string reason);

  base::Synchronized<State> state_;
  std::condition_variable changed_;
};

} // namespace torch_rpc_ext::agent
