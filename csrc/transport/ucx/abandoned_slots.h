#pragma once

#include "base/poller.h"
#include "base/synchronized.h"
#include "base/task.h"
#include "base/timer.h"

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// Frees the slot that a sender leaves behind when it is killed while it writes.
//
// In UCX's shared memory all senders of a host share one queue of the receiver.
// A sender takes the next slot, writes into it, marks it as full, and wakes the
// receiver if the receiver sleeps. The receiver reads the slots in order. So a
// slot that was taken and is never marked keeps the receiver from hearing any
// sender of its host, for ever; UCX has no remedy. Here such a slot is marked
// as a message that UCX drops, once it is certain that no thread is writing
// into it any more: since the search for writers, each thread of each process
// that has the queue mapped has ended, slept, or computed for a while. Writing
// a slot takes a few instructions, and a thread in the middle of them has done
// none of these. A sender may also be killed right before it wakes the
// receiver, so the receiver is woken here, too.
//
// The queue is UCX's own, and so is its layout: a queue that does not look as
// expected is left alone (docs/decisions/0017-abandoned-slots.md).
//
// Owns: a timer.
// Thread: any.
// Outlives: nothing that it is given.
class AbandonedSlots {
 public:
  // `progress` makes the receiver look at its queue.
  AbandonedSlots(
      base::Poller& poller,
      base::TaskRunner& runner,
      std::function<void()> progress);

  // To be called when this process has a further UCX worker, which has a queue
  // of its own.
  void workerAdded() {
    searched_ = false;
  }
  // To be called when a peer may have died: looks at the queues at once.
  void lookSoon();
  void stop();

 private:
  // A thread of another process that may be writing into the slot.
  struct Writer {
    pid_t process;
    pid_t thread;
    uint64_t ticks; // of CPU time, when writersTo() found the thread
  };
  struct Queue {
    uint64_t address;
    std::string file; // device and inode, as in /proc/PID/maps
    uint64_t slot = 0; // the first that was taken and is not full
    int looks = 0; // how many in a row have found `slot` like that
    std::vector<Writer> writers = {};
  };

  static std::vector<Queue> queuesOfThisProcess();
  static std::vector<Writer> writersTo(const Queue& queue);
  // Returns false if the slot cannot be freed.
  static bool freeSlot(const Queue& queue);
  void look();
  // Returns false if there is no use in looking again.
  bool lookAt(Queue& queue);

  base::TaskRunner& runner_;
  const std::function<void()> progress_;
  std::atomic<bool> searched_{false};
  base::Synchronized<std::vector<Queue>> queues_;
  base::Timer timer_;
};

} // namespace torch_rpc_ext::transport::ucx
