#pragma once

#include "base/synchronized.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace torch_rpc_ext::base {

// Decides whether a thread that has to wait for a message polls for a moment
// before it sleeps. To wake a sleeping thread costs 20 to 50 us where its core
// is idle, which is more than all the rest of a small call. But a thread that
// polls in vain takes the core from others, so a thread polls only
//  - while no more threads of the machine want to run than it has cores,
//  - while polling has not failed lately: after each miss in a row, twice as
//    many waits as before go by without polling, and
//  - while the time that was polled in vain stays below 1/kWasteShare of all
//    time.
//
// Owns: what it has learned.
// Thread: any.
class BusyPoll {
 public:
  using Clock = std::chrono::steady_clock;
  using Duration = std::chrono::nanoseconds;

  // What a thread waits for; each is judged by its own past.
  enum class For : uint8_t { kAnswer, kRequest };

  // The longest that a thread polls in a row: the time that a peer needs to
  // wake up and to answer.
  static constexpr Duration kMost = std::chrono::microseconds(100);
  static constexpr int kWasteShare = 50;

  // Whether a core is idle: no more threads want to run than there are cores.
  using HasIdleCore = std::function<bool()>;

  explicit BusyPoll(bool on, HasIdleCore hasIdleCore = machineHasIdleCore);

  // For how long the calling thread may poll now; 0: the thread should sleep at
  // once. A thread that has polled calls ended().
  Duration allowance(For what, Clock::time_point now);
  // The thread has polled for `spent`. `found`: what it waited for has come.
  // `interrupted`: another thread had the core meanwhile.
  void ended(For what, Duration spent, bool found, bool interrupted);

  struct Stats {
    uint64_t found = 0; // waits that ended while the thread polled
    // Waits in which the thread polled in vain, or another thread had the core.
    uint64_t missed = 0;
    uint64_t missedNanoseconds = 0;
  };
  Stats stats() const;

  static bool machineHasIdleCore();

 private:
  struct Past {
    // In the next `skip` waits of this kind no thread polls.
    uint32_t skip = 0;
    // Misses in a row, up to kMaxBackoff. The last one set `skip` to
    // 1 << backoff.
    uint32_t backoff = 0;
  };

  struct State {
    std::array<Past, 2> pasts;
    // How long the threads may still poll in vain; grows with time.
    Duration budget;
    Clock::time_point budgetAt{};
    uint32_t idleCores = 0; // how often in a row hasIdleCore_ said yes
    Clock::time_point idleCoresAt{}; // when hasIdleCore_ was asked last
  };

  const bool on_;
  const HasIdleCore hasIdleCore_;
  Synchronized<State> state_;

  std::atomic<uint64_t> found_{0};
  std::atomic<uint64_t> missed_{0};
  std::atomic<uint64_t> missedNanoseconds_{0};
};

} // namespace torch_rpc_ext::base
