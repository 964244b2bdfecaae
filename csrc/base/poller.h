#pragma once

#include "base/descriptor.h"
#include "base/event_fd.h"
#include "base/synchronized.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>

namespace torch_rpc_ext::base {

class TimerQueue;

// A set of file descriptors that several threads wait on at once. Each event
// wakes one thread, which runs the descriptor's handler; the descriptor is then
// disarmed until rearm(), so two threads never run one handler at a time.
//
// One descriptor may be the main one. A thread that has to wait for a result
// anyway can lead (class Lead): it takes the main descriptor from the other
// waiters and runs its handler itself, so that no other thread has to hand the
// result over. Another thread may still be in the main descriptor's handler at
// that moment, so this handler must allow two threads at a time. A leader may
// also look for input without sleeping (Lead::poll()).
//
// Owns: the epoll descriptor, the handlers and the TimerQueue; not the watched
//   descriptors.
// Thread: any.
// Outlives: every registered descriptor.
class Poller {
 public:
  using Handler = std::function<void()>;
  // Handles the input of the main descriptor that has arrived, and returns
  // whether there was any. Does not sleep.
  using Look = std::function<bool()>;

  Poller();
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Watches `fd` for input.
  void add(int fd, Handler handler);
  void addMain(int fd, Handler handler, Look look);
  void rearm(int fd);
  // No later event starts the handler. But a thread that took an event just
  // before, or that leads, may still run the handler after this returns.
  void remove(int fd);

  // What ended a wait. kEvent: an event, whose handler has run on this thread.
  // kWake: a call of wake(). kTimeout: the time is over, or a signal of the
  // operating system came.
  enum class Ended { kEvent, kWake, kTimeout };

  // `timeoutMs` -1 waits for ever.
  Ended wait(int timeoutMs = -1);

  // Wakes one waiting thread, or, if none waits, the next that begins to wait.
  // Several calls before that thread wakes up count as one.
  void wake();

  TimerQueue& timers() {
    return *timers_;
  }

  class Lead;

 private:
  struct Entry {
    int fd;
    Handler handler;
    Look look; // of the main descriptor
  };
  using EntryPtr = std::shared_ptr<const Entry>;
  struct State {
    int mainFd = -1;
    bool led = false; // a Lead has the main descriptor
    bool ledByGuest = false; // the last Lead that took it was a guest's
    uint64_t nextKey = 1; // 0 is the key of wakeEvent_
    std::unordered_map<int, uint64_t> keys; // by descriptor
    std::unordered_map<uint64_t, EntryPtr> entries;
  };

  void add(State& state, Entry entry);
  EntryPtr find(uint64_t key);
  void control(int operation, int fd, uint64_t key, uint32_t events);

  const Descriptor epoll_;
  EventFd wakeEvent_;
  Synchronized<State> state_;
  std::atomic<bool> wanted_{false}; // a waiter waits until the guest gives
  std::unique_ptr<TimerQueue> timers_; // last: its destructor calls remove()
};

// While this exists, and until give(), one thread has the main descriptor for
// itself.
// Thread: the one that made it. A Signal: any.
class Poller::Lead {
 public:
  // Another thread ends the leader's wait with raise(). May outlive the Lead.
  using Signal = EventFd;

  // kWaiter: the thread leads while it waits for its own answer. kGuest: the
  // thread only looks for input for a moment, and gives the main descriptor
  // back when a waiter wants it (isWanted()).
  enum class As { kWaiter, kGuest };

  // Takes the main descriptor, unless there is none or another Lead has it. A
  // waiter takes it from a guest.
  Lead(Poller& poller, std::shared_ptr<Signal> signal, As as = As::kWaiter);
  ~Lead() {
    give();
  }
  Lead(const Lead&) = delete;
  Lead& operator=(const Lead&) = delete;

  // Whether this has the main descriptor.
  bool leads() const {
    return entry_ != nullptr;
  }
  // Only if leads(). As Poller::wait(), but kWake means that the signal was
  // raised.
  Ended wait(int timeoutMs = -1);
  // Only if leads(). Runs the main descriptor's Look.
  bool poll();
  // Whether another thread wants to lead, so that a guest has to give().
  bool isWanted() const {
    return poller_.wanted_.load(std::memory_order_relaxed);
  }
  // Gives the main descriptor back to the Poller's waiters.
  void give();

 private:
  // Takes the main descriptor, unless there is none or another Lead has it.
  // Returns whether a guest has it.
  bool take(As as);

  Poller& poller_;
  const std::shared_ptr<Signal> signal_;
  EntryPtr entry_;
};

} // namespace torch_rpc_ext::base
