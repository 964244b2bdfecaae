#pragma once

#include <chrono>
#include <cstdint>

namespace torch_rpc_ext::base {

// For a thread that copies much and calls yield() every 20 us or so. A thread
// that wakes up on the same core then runs at the next yield(), and need not
// wait for the scheduler's next tick, up to 4 ms later.
//
// A thread that yields gives up the rest of its time slice. With the default of
// 3 ms the copying thread would lose most of the core to threads that compute,
// so while this object exists the slice is 0.1 ms. After a yield() that took
// long, because another thread computed, later calls return at once for as long
// as this yield() took.
//
// Linux before 6.12 ignores the shorter slice, but there a yield() costs
// little. Needs no privilege. Where the kernel refuses the change, yield() does
// nothing. Thread: the one that made it.
class ShortTimeSlices {
 public:
  ShortTimeSlices();
  ~ShortTimeSlices();
  ShortTimeSlices(const ShortTimeSlices&) = delete;
  ShortTimeSlices& operator=(const ShortTimeSlices&) = delete;

  void yield();

 private:
  using Clock = std::chrono::steady_clock;

  // The kernel's struct sched_attr. Declared here because the kernel's header
  // and glibc's <sched.h> cannot both be included.
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
  Clock::time_point keptUntil_; // yield() does nothing before this
};

} // namespace torch_rpc_ext::base
