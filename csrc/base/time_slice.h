#pragma once

#include <cstdint>

namespace torch_rpc_ext::base {

// While it exists, the calling thread tells the scheduler that it runs for long
// and does not mind to be interrupted: whoever wakes up gets its core at once
// and not after the thread's time slice. From Linux 6.12 on; before, and where
// it is forbidden, nothing changes. Needs no privilege.
// Thread: the one that made it.
class LongTimeSlice {
 public:
  LongTimeSlice();
  ~LongTimeSlice();
  LongTimeSlice(const LongTimeSlice&) = delete;
  LongTimeSlice& operator=(const LongTimeSlice&) = delete;

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
