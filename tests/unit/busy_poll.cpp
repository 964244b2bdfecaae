// base::BusyPoll, with a clock and a machine of the test's own.

#include "base/busy_poll.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

using namespace torch_rpc_ext;
using base::BusyPoll;
using For = BusyPoll::For;

namespace {

constexpr BusyPoll::Duration kNone{0};
constexpr auto kQuick = std::chrono::microseconds(5);

void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::_Exit(1);
  }
}

// A thread that waits again and again.
struct Waiter {
  explicit Waiter(bool on = true)
      : polls(on, [this] {
          ++asked;
          return idleCore;
        }) {
    findIdleCore();
  }

  // One wait for `what`, which comes after `comesAfter`. Returns for how long
  // the thread has polled.
  BusyPoll::Duration
  wait(For what, BusyPoll::Duration comesAfter, bool interrupted = false) {
    const auto most = polls.allowance(what, now);
    const auto spent = std::min(most, comesAfter);
    if (most != kNone) {
      polls.ended(what, spent, comesAfter <= most, interrupted);
    }
    now += comesAfter;
    return spent;
  }

  // The next wait may poll: there has been an idle core for some milliseconds.
  void findIdleCore() {
    idleCore = true;
    for (int i = 0; i < 3; ++i) {
      require(polls.allowance(For::kRequest, now) == kNone, "not yet");
      now += std::chrono::milliseconds(2);
    }
  }

  bool idleCore = true;
  int asked = 0;
  BusyPoll polls;
  BusyPoll::Clock::time_point now{std::chrono::hours(1)};
};

void whatComesSoonIsPolledFor() {
  Waiter waiter;
  for (int i = 0; i < 1000; ++i) {
    require(waiter.wait(For::kAnswer, kQuick) == kQuick, "each wait polls");
  }
  require(waiter.polls.stats().found == 1000, "all waits are counted as found");
  require(waiter.asked <= 10, "the machine is asked once per millisecond");
}

void pollingInVainIsBounded() {
  std::mt19937 random(1);
  for (int run = 0; run < 200; ++run) {
    Waiter waiter;
    const auto begin = waiter.now;
    const auto share = random() % 101; // of waits that end soon, in percent
    BusyPoll::Duration vain{0};
    for (int i = 0; i < 3000; ++i) {
      const bool soon = random() % 100 < share;
      const auto after = soon
          ? kQuick
          : BusyPoll::Duration(std::chrono::microseconds(101 + random() % 900));
      const auto what = random() % 2 == 0 ? For::kAnswer : For::kRequest;
      const auto spent = waiter.wait(what, after);
      vain += soon ? kNone : spent;
    }
    const auto most = (waiter.now - begin) / BusyPoll::kWasteShare +
        BusyPoll::kMost + std::chrono::milliseconds(1);
    require(vain <= most, "a fiftieth of the time, and one burst");
    require(
        waiter.polls.stats().missedNanoseconds ==
            static_cast<uint64_t>(vain.count()),
        "all of it is counted");
  }
}

void nobodyPollsWithoutAnIdleCore() {
  Waiter waiter;
  waiter.idleCore = false;
  require(waiter.wait(For::kAnswer, kQuick) == kNone, "no idle core");
  waiter.now += std::chrono::milliseconds(2);
  waiter.findIdleCore();
  require(waiter.wait(For::kAnswer, kQuick) == kQuick, "an idle core again");
  require(Waiter(false).wait(For::kAnswer, kQuick) == kNone, "switched off");
}

void eachKindOfWaitHasItsOwnPast() {
  Waiter waiter;
  for (int i = 0; i < 9; ++i) {
    waiter.wait(For::kRequest, std::chrono::seconds(1));
  }
  require(waiter.wait(For::kRequest, kQuick) == kNone, "requests come late");
  require(waiter.wait(For::kAnswer, kQuick) == kQuick, "answers come soon");
}

// How many waits pass until the thread polls again.
int waitsUntilItPolls(Waiter& waiter) {
  int waits = 0;
  while (waiter.wait(For::kAnswer, kQuick) == kNone && waits < 10'000) {
    ++waits;
  }
  return waits;
}

void aMissMakesTheNextAttemptLater() {
  Waiter waiter;
  waiter.wait(For::kAnswer, std::chrono::milliseconds(20));
  require(waitsUntilItPolls(waiter) == 2, "after two waits");
  waiter.wait(For::kAnswer, kQuick, /*interrupted=*/true);
  require(waitsUntilItPolls(waiter) == 2, "an interruption is a miss too");
  for (int i = 0; i < 10'000; ++i) {
    waiter.wait(For::kAnswer, std::chrono::milliseconds(20));
  }
  require(waitsUntilItPolls(waiter) <= 256, "but never for ever");
}

} // namespace

int main() {
  whatComesSoonIsPolledFor();
  pollingInVainIsBounded();
  nobodyPollsWithoutAnIdleCore();
  eachKindOfWaitHasItsOwnPast();
  aMissMakesTheNextAttemptLater();
  return 0;
}
