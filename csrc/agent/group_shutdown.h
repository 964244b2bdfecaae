#pragma once

#include "agent/answers.h"
#include "agent/arrival.h"
#include "agent/caller.h"
#include "agent/devices.h"
#include "agent/group.h"

#include <chrono>
#include <cstdint>
#include <functional>

namespace torch_rpc_ext::agent {

// Finds out when a static group has come to rest, so that its workers can end.
//
// Each member waits until it has no call under way, then reports to a leader,
// which answers when all members have reported (barrier.h). A nested call may
// have begun meanwhile, so all report once more, now with the number of their
// calls under way. When the sum is zero, no call can begin any more; else all
// start over.
//
// Owns: the number of the round.
// Thread: join(), one thread at a time; serve(), any.
class GroupShutdown {
 public:
  // The references outlive it. `checkInterrupt` is called every 100 ms while
  // join() waits, and ends the wait by throwing.
  GroupShutdown(
      Group& group,
      Caller& caller,
      Answers& answers,
      Devices& devices,
      std::function<void()> checkInterrupt);

  // Blocks until no worker has calls under way. `timeout` in seconds; 0 waits
  // for ever.
  void join(float timeout);
  // Handles the report of a member; this worker leads.
  void serve(Arrival& arrival);

 private:
  // Repeats `wait`, a bool(std::chrono::milliseconds patience), until it
  // returns true. False after the deadline, even if `wait` has returned true: a
  // group that never comes to rest must time out, too.
  template <typename F>
  bool waitInterruptibly(
      std::chrono::steady_clock::time_point deadline,
      F&& wait);
  void waitForOwnCalls(std::chrono::steady_clock::time_point deadline);
  void waitForReaders(std::chrono::steady_clock::time_point deadline);
  int64_t barrier(
      int64_t active,
      std::chrono::steady_clock::time_point deadline);

  Group& group_;
  Caller& caller_;
  Answers& answers_;
  Devices& devices_;
  const std::function<void()> checkInterrupt_;
  uint64_t round_ = 0;
};

} // namespace torch_rpc_ext::agent
