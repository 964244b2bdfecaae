#pragma once

#include <chrono>
#include <cstdint>

namespace torch_rpc_ext::base {

// For a thread that copies much and calls yield() every 20 us or so: whoever
// wakes up behind it runs then, and not after the scheduler's next tick, which
// is 4 ms. A thread that yields gives up the rest of its slice. While this
// exists, that is 0.1 ms and not the default 3 ms, which would be most of the
// core wherever others compute. Where they do, it keeps the core for as long as
// they had it. From Linux 6.12 on; before, slices are the default and to yield
// costs little. Needs no privilege; where it is forbidden yield() does nothing.
// Thread: the one that made it.
class ShortTimeSlices {
 public:
  ShortTimeSlices();
  ~ShortTimeSlices();
  ShortTimeSlices(const ShortTimeSlices&) = delete;
  ShortTimeSlices& operator=(const ShortTimeSlices&) = delete;

  void yield();

 private:
  using Clock = std::chrono::steady_clock;

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
  Clock::time_point keptUntil_; // no yield() before
};

} // namespace torch_rpc_ext::base
