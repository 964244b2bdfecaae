#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace torch_rpc_ext::agent {

// What happens to the other workers of the group, in the order in which it
// happens to each, for who asks. Two sources are brought together here: the
// list of members, and the connections. They tell of the same departure twice,
// which is one event.
//
// Owns: what is known of each worker, and the events that nobody has taken.
// Thread: any.
class WorkerEvents {
 public:
  enum class Kind { kJoined, kReturned, kLost, kLeft, kBegan, kEnded };
  struct Event {
    Kind kind = Kind::kEnded;
    std::string worker = {};
    std::string reason = {};
  };

  // It is a member now, in that life.
  void added(const std::string& worker, uint32_t life);
  // It is no member any more.
  void removed(const std::string& worker);
  // The last connection to it has ended: by the worker itself (`left`), or not.
  void unreachable(const std::string& worker, bool left, std::string reason);
  // It speaks to this one.
  void heardOf(const std::string& worker);
  // The group shuts down: who leaves from here on does what all do.
  void groupEnds();

  // Keeps events from here on. The first are those of the workers that are lost
  // already; then, at each call, comes kBegan.
  void begin();
  // The next event. Nothing after `patience`; kEnded for ever after end().
  std::optional<Event> next(std::chrono::milliseconds patience);
  void end();

 private:
  struct State {
    uint32_t life = 0;
    Kind last = Kind::kJoined;
    std::string reason = {};
  };

  static bool isGone(const State& state);
  void pushLocked(const std::string& worker, State& state, Kind, std::string);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, State> workers_;
  std::deque<Event> events_;
  bool kept_ = false;
  bool groupEnds_ = false;
  bool ended_ = false;
};

} // namespace torch_rpc_ext::agent
