#include "base/busy_poll.h"

#include "base/descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace torch_rpc_ext::base {

namespace {

// For this long the threads may poll in vain in a burst.
constexpr BusyPoll::Duration kMostBudget = std::chrono::milliseconds(1);
// 1 << 8 waits are skipped at most: then the thread tries again.
constexpr uint32_t kMaxBackoff = 8;
// For how long an answer of `hasIdleCore` holds: to ask takes 1 to 3 us.
constexpr std::chrono::milliseconds kIdleCoreHolds{1};
// This many answers in a row must be "yes". One answer may be wrong, because
// /proc/loadavg does not count a thread that is just being woken.
constexpr uint32_t kAnswersWanted = 4;

// How many threads of this machine run or want to: the fourth field of
// /proc/loadavg, such as "0.22 0.06 0.02 1/123 456". -1 if that is not known.
long runnableThreads() {
  // Stays open, because opening takes longer than reading.
  static const Descriptor file(::open("/proc/loadavg", O_RDONLY | O_CLOEXEC));
  char text[128] = {};
  const ssize_t size = ::pread(file.fd(), text, sizeof(text) - 1, 0);
  const char* at = size > 0 ? text : "";
  for (int field = 0; field < 3 && at != nullptr; ++field) {
    at = std::strchr(at, ' ');
    at = at == nullptr ? nullptr : at + 1;
  }
  char* end = nullptr;
  const long count = at == nullptr ? -1 : std::strtol(at, &end, 10);
  return end != nullptr && *end == '/' ? count : -1;
}

} // namespace

BusyPoll::BusyPoll(bool on, HasIdleCore hasIdleCore)
    : on_(on),
      hasIdleCore_(std::move(hasIdleCore)),
      state_(State{.pasts = {}, .budget = kMostBudget}) {}

BusyPoll::Duration BusyPoll::allowance(For what, Clock::time_point now) {
  if (!on_) {
    return Duration{0};
  }
  auto state = state_.lock();
  Past& past = state->pasts[static_cast<size_t>(what)];
  if (past.skip != 0) {
    --past.skip;
    return Duration{0};
  }
  // Threads may ask in another order than they looked at the clock.
  const auto passed = std::max(now - state->budgetAt, Clock::duration{0});
  state->budget = std::min(state->budget + passed / kWasteShare, kMostBudget);
  state->budgetAt += passed;
  if (state->budget < kMost) {
    return Duration{0};
  }
  uint32_t idleCores = state->idleCores;
  if (now - state->idleCoresAt > kIdleCoreHolds) {
    state->idleCoresAt = now;
    state.unlock(); // to ask takes long
    idleCores = hasIdleCore_() ? idleCores + 1 : 0;
    state_.lock()->idleCores = idleCores;
  }
  return idleCores >= kAnswersWanted ? kMost : Duration{0};
}

void BusyPoll::ended(For what, Duration spent, bool found, bool interrupted) {
  auto state = state_.lock();
  Past& past = state->pasts[static_cast<size_t>(what)];
  if (found && !interrupted) {
    past.backoff = 0;
    found_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  // A thread that was interrupted competes with others for its core, so its
  // wait counts as missed, even if the thread found something.
  past.backoff = std::min(past.backoff + 1, kMaxBackoff);
  past.skip = 1u << past.backoff;
  state->budget -= spent;
  missed_.fetch_add(1, std::memory_order_relaxed);
  missedNanoseconds_.fetch_add(
      static_cast<uint64_t>(spent.count()), std::memory_order_relaxed);
}

BusyPoll::Stats BusyPoll::stats() const {
  return {found_.load(), missed_.load(), missedNanoseconds_.load()};
}

bool BusyPoll::machineHasIdleCore() {
  static const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  const long runnable = runnableThreads(); // the calling thread is one of them
  return runnable > 0 && runnable <= online;
}

} // namespace torch_rpc_ext::base
