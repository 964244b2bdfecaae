#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
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
  // Handles the input that is there, and returns whether there was any. Does
  // not sleep.
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
  // kTimeout: the time is over, or a signal came.
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

  std::shared_ptr<Entry> find(uint64_t key);
  void control(int operation, int fd, uint64_t key, uint32_t events);

  int epollFd_;
  int wakeFd_;
  std::mutex mutex_;
  int mainFd_ = -1;
  bool led_ = false; // a Lead holds the main descriptor
  bool ledByGuest_ = false; // and gives it back when another thread wants it
  std::atomic<bool> wanted_{false}; // another thread waits for a guest's Lead
  uint64_t nextKey_ = 1; // 0 is the key of wakeFd_
  std::unordered_map<int, uint64_t> keys_; // by descriptor
  std::unordered_map<uint64_t, std::shared_ptr<Entry>> entries_;
  std::unique_ptr<TimerQueue> timers_;
};

// While this exists, and until give(), one thread has the main descriptor for
// itself.
// Thread: the one that made it. A Signal: any.
class Poller::Lead {
 public:
  // Another thread ends the leader's wait with raise(). May outlive the Lead.
  class Signal {
   public:
    Signal();
    ~Signal();
    Signal(const Signal&) = delete;
    Signal& operator=(const Signal&) = delete;
    void raise();

   private:
    friend class Lead;
    int fd_;
  };

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
  // Only if leads(). Handles the input of the main descriptor that is there,
  // and returns whether there was any. Does not sleep.
  bool poll();
  // Whether another thread wants to lead, so that a guest has to give().
  bool isWanted() const {
    return poller_.wanted_.load(std::memory_order_relaxed);
  }
  // Gives the main descriptor back to the Poller's waiters.
  void give();

 private:
  Poller& poller_;
  const std::shared_ptr<Signal> signal_;
  std::shared_ptr<Entry> entry_;
};

} // namespace torch_rpc_ext::base
