#pragma once

#include <cstdint>

namespace torch_rpc_ext::base {

// For a thread that copies much and calls yield() every 0.1 ms or so: while
// this exists, the scheduler gives it its core in slices of that length.
// Whoever wakes up behind it runs after a piece of the copy; without yield()
// it would be after the scheduler's next tick, 4 ms. And yield() gives up the
// rest of a slice: of the default one, 3 ms, it would be most of the core
// wherever others compute. From Linux 6.12 on; before, slices are the default
// and yield() costs little. Needs no privilege; where it is forbidden yield()
// does nothing.
// Thread: the one that made it.
class ShortTimeSlices {
 public:
  ShortTimeSlices();
  ~ShortTimeSlices();
  ShortTimeSlices(const ShortTimeSlices&) = delete;
  ShortTimeSlices& operator=(const ShortTimeSlices&) = delete;

  void yield() const;

 private:
  // struct sched_attr of the kernel, whose header and glibc's <sched.h> exclude
  // each other.
  struct Attributes {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime; // ns: the time slice; 0 for the default
    uint64_t deadline;
    uint64_t period;
  };

  Attributes attributes_{};
  bool changed_ = false;
};

} // namespace torch_rpc_ext::base
