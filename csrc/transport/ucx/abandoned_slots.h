#pragma once

#include "base/poller.h"
#include "base/task.h"
#include "base/timer.h"

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// Frees what a sender leaves behind that is killed while it writes.
//
// In UCX's shared memory all senders of a host share one queue of the receiver.
// A sender takes the next slot, writes into it, marks it as full, and wakes the
// receiver if that sleeps. The receiver reads the slots in their order: one
// that was taken and is never marked keeps it from hearing anybody of its host,
// for ever; UCX has no remedy. Here such a slot is marked as a message that UCX
// drops, once it is certain that nobody is writing into it any more: each
// thread of each process that has the queue mapped has slept, or computed for a
// while, since the slot was found, which a thread amid those few instructions
// does not. And a receiver that was not woken is.
//
// The queue is UCX's own, and so is its layout: one that does not look as
// expected is left alone (docs/decisions/0017-abandoned-slots.md).
//
// Owns: a timer.
// Thread: any.
// Outlives: nothing that it is given.
class AbandonedSlots {
 public:
  // `progress` has the receiver look at its queue.
  AbandonedSlots(
      base::Poller& poller,
      base::TaskRunner& runner,
      std::function<void()> progress);

  // There is one more UCX worker in this process.
  void workerAdded() {
    searched_ = false;
  }
  // Somebody may have died.
  void lookSoon();
  void stop();

 private:
  // A thread that may be writing into the slot.
  struct Writer {
    pid_t process;
    pid_t thread;
    uint64_t ticks; // of CPU time, when the slot was found
  };
  struct Queue {
    uint64_t address;
    std::string file; // device and inode, as in /proc/PID/maps
    uint64_t slot = 0; // that was taken and is not full, the first one
    int looks = 0; // that have found it so
    std::vector<Writer> writers = {};
  };

  static std::vector<Queue> queuesOfThisProcess();
  static std::vector<Writer> writersTo(const Queue& queue);
  // False: it cannot be.
  static bool freeSlot(const Queue& queue);
  void look();
  // False: there is no use in looking again.
  bool lookAt(Queue& queue);

  base::TaskRunner& runner_;
  const std::function<void()> progress_;
  std::atomic<bool> searched_{false};
  std::mutex mutex_;
  std::vector<Queue> queues_;
  base::Timer timer_;
};

} // namespace torch_rpc_ext::transport::ucx
