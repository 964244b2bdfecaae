// The Executor alone: what stop() and a thread that leads run.

#include "agent/executor.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace torch_rpc_ext;

namespace {

// stop() runs the completions that are queued, also while as many threads are
// busy as there are cores: they may wait for what is queued. Returns whether
// the threads end; `false` after ten seconds.
bool ends() {
  const auto busy = std::max(2u, std::thread::hardware_concurrency());
  // Kept for ever when the threads do not end.
  auto* const executor = new agent::Executor(busy);
  const auto started = std::make_shared<std::latch>(busy);
  const auto released = std::make_shared<std::latch>(1);
  executor->start();
  for (unsigned i = 0; i < busy; ++i) {
    executor->submitCompletion(base::makeTask([started, released] {
      started->count_down();
      released->wait();
    }));
  }
  started->wait();
  executor->submitCompletion(
      base::makeTask([released] { released->count_down(); }));
  return executor->stop(/*milliseconds=*/10'000);
}

// A thread that leads runs what it has claimed itself, in the order that the
// claims say, before its wait ends.
bool runsWhatItClaims() {
  using Claims = agent::Executor::Claims;
  agent::Executor executor(/*requestThreads=*/2);
  base::EventFd input;
  const auto here = std::this_thread::get_id();
  std::vector<int> ran;
  bool elsewhere = false;
  const auto submit = [&](Claims claims, int number) {
    const agent::Executor::Claim claim(claims);
    executor.submitCompletion(base::makeTask([&, number] {
      elsewhere |= std::this_thread::get_id() != here;
      ran.push_back(number);
    }));
  };
  executor.poller().addMain(
      input.fd(),
      [&] {
        input.take();
        submit(Claims::kLast, 3);
        submit(Claims::kFirst, 2);
        submit(Claims::kFirst, 1);
        submit(Claims::kLast, 4);
      },
      [] { return false; });
  executor.start();
  bool whole = false;
  {
    agent::Executor::Leader leader(executor);
    input.raise(); // the leader has the descriptor already
    whole = leader.wait([] { return false; });
  }
  executor.poller().remove(input.fd());
  return executor.stop(/*milliseconds=*/10'000) && whole && !elsewhere &&
      ran == std::vector{1, 2, 3, 4};
}

// A request runs a function of a user, so a thread that waits for an answer
// begins none, also if what the answer needs lets one begin.
bool beginsNoRequestInAWait() {
  agent::Executor executor(/*requestThreads=*/1);
  base::EventFd input;
  std::thread::id servedOn;
  std::latch served(1);
  executor.poller().addMain(
      input.fd(),
      [&] {
        input.take();
        const agent::Executor::Claim claim(agent::Executor::Claims::kLast);
        executor.submit(base::makeTask([&] {
          executor.submitRequest(base::makeTask([&] {
            servedOn = std::this_thread::get_id();
            served.count_down();
          }));
        }));
      },
      [] { return false; });
  executor.start();
  {
    agent::Executor::Leader leader(executor);
    input.raise();
    leader.wait([] { return false; });
  }
  executor.poller().remove(input.fd());
  served.wait();
  return executor.stop(/*milliseconds=*/10'000) &&
      servedOn != std::this_thread::get_id();
}

// What is undone after each task may fail, for lack of a thread for one; the
// threads go on.
bool goesOnAfterAnException() {
  agent::Executor executor(/*requestThreads=*/1);
  executor.setAfterTask([] { throw std::runtime_error("no thread"); });
  executor.start();
  for (int i = 0; i < 3; ++i) {
    const auto ran = std::make_shared<std::latch>(1);
    executor.submitCompletion(base::makeTask([ran] { ran->count_down(); }));
    ran->wait();
  }
  return executor.stop(/*milliseconds=*/10'000);
}

} // namespace

int main() {
  if (!runsWhatItClaims()) {
    std::fprintf(stderr, "what the leader claims does not run as it should\n");
    std::_Exit(1);
  }
  if (!beginsNoRequestInAWait()) {
    std::fprintf(
        stderr, "a thread that waits for an answer serves a request\n");
    std::_Exit(1);
  }
  if (!goesOnAfterAnException()) {
    std::fprintf(stderr, "the threads do not end after an exception\n");
    std::_Exit(1);
  }
  // The thread that attends to the queue takes the task after a millisecond
  // anyway: stop() is quicker than that in most rounds.
  for (int round = 0; round < 20; ++round) {
    if (!ends()) {
      std::fprintf(stderr, "round %d: the threads do not end\n", round);
      std::_Exit(1);
    }
  }
  return 0;
}
