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

// How a static group finds out that it has come to rest.
//
// All members wait until they have no call under way, then report to a leader,
// which answers when all have reported (barrier.h). Meanwhile a nested call may
// have begun somewhere, so they report once more, now with the number of their
// calls: when the sum is zero nothing can begin any more.
//
// Owns: the number of the round.
// Thread: join(), one at a time; serve(), any.
class GroupShutdown {
 public:
  // The references outlive it. `checkInterrupt` is called every 100 ms while
  // join() waits, and throws to end it; it may be null.
  GroupShutdown(
      Group& group,
      Caller& caller,
      Answers& answers,
      Devices& devices,
      std::function<void()> checkInterrupt);

  // Blocks until no worker has calls under way. `timeout` in seconds; 0 waits
  // for ever.
  void join(float timeout);
  // A member reports to this one, which leads.
  void serve(Arrival& arrival);

 private:
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
