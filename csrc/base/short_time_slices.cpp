#include "base/short_time_slices.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace torch_rpc_ext::base {

namespace {

constexpr uint64_t kSliceNanoseconds = 100'000;
// A thread that takes the core for longer than this computes, and does not just
// handle a small call.
constexpr std::chrono::microseconds kLong{500};

} // namespace

ShortTimeSlices::ShortTimeSlices() {
  if (syscall(SYS_sched_getattr, 0, &attributes_, sizeof(attributes_), 0) !=
          0 ||
      attributes_.policy != SCHED_OTHER) {
    return;
  }
  attributes_.runtime = kSliceNanoseconds;
  changed_ = syscall(SYS_sched_setattr, 0, &attributes_, 0) == 0;
}

ShortTimeSlices::~ShortTimeSlices() {
  if (changed_) {
    attributes_.runtime = 0;
    syscall(SYS_sched_setattr, 0, &attributes_, 0);
  }
}

void ShortTimeSlices::yield() {
  const auto before = Clock::now();
  if (!changed_ || before < keptUntil_) {
    return;
  }
  sched_yield();
  const auto after = Clock::now();
  if (after - before > kLong) {
    keptUntil_ = after + (after - before);
  }
}

} // namespace torch_rpc_ext::base
