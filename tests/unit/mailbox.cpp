// Mailbox alone: what ends a wait, and when.

#include "agent/mailbox.h"
#include "sanitize/stress.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <ctime>
#include <thread>

using namespace torch_rpc_ext;
using stress::require;

// A wall clock that is ten seconds ahead of the kernel's: as if somebody had
// set back the kernel's clock right after each look at it.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto failed = syscall(SYS_clock_gettime, clock, time);
  if (clock == CLOCK_REALTIME) {
    time->tv_sec += 10;
  }
  return static_cast<int>(failed);
}

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

void testAWaitEndsAfterASecond() {
  agent::Mailbox mailbox;
  const auto begin = Clock::now();
  require(!mailbox.serve([] { return false; }), "nobody rings");
  const auto waited = Clock::now() - begin;
  require(waited >= milliseconds(1000), "it does not poll");
  require(waited < milliseconds(9000), "it does not use the wall clock");
}

void testASignalEndsAWait() {
  std::signal(SIGUSR1, [](int) {});
  agent::Mailbox mailbox;
  std::atomic<bool> over{false};
  std::thread other([&over, waiting = pthread_self()] {
    while (!over.load()) { // a signal may come before the wait begins
      std::this_thread::sleep_for(milliseconds(20));
      pthread_kill(waiting, SIGUSR1);
    }
  });
  // Without a signal, every wait takes a second. With signals a wait takes as
  // long only if this machine is busy elsewhere.
  bool ended = false;
  for (int i = 0; i < 20 && !ended; ++i) {
    const auto begin = Clock::now();
    require(!mailbox.serve([] { return false; }), "nobody rings");
    ended = Clock::now() - begin < milliseconds(1000);
  }
  require(ended, "a signal ended it");
  over.store(true);
  other.join();
}

void testARingEndsAWait() {
  agent::Mailbox mailbox;
  std::atomic<bool> done{false};
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(20));
    done.store(true);
    mailbox.ring();
  });
  require(mailbox.serve([&] { return done.load(); }), "it is done");
  other.join();
}

} // namespace

int main() {
  testAWaitEndsAfterASecond();
  testASignalEndsAWait();
  testARingEndsAWait();
  return 0;
}
