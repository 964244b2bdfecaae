#include "base/time_slice.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace torch_rpc_ext::base {

namespace {

constexpr uint64_t kNanoseconds = 20'000'000;

} // namespace

LongTimeSlice::LongTimeSlice() {
  if (syscall(SYS_sched_getattr, 0, &attributes_, sizeof(attributes_), 0) !=
          0 ||
      attributes_.policy != SCHED_OTHER) {
    return;
  }
  attributes_.runtime = kNanoseconds;
  changed_ = syscall(SYS_sched_setattr, 0, &attributes_, 0) == 0;
}

LongTimeSlice::~LongTimeSlice() {
  if (changed_) {
    attributes_.runtime = 0;
    syscall(SYS_sched_setattr, 0, &attributes_, 0);
  }
}

} // namespace torch_rpc_ext::base
