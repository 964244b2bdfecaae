#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace torch_rpc_ext::base {

class TimerQueue;

// A set of file descriptors that several threads wait on at once. Each event
// wakes one thread, which runs the descriptor's handler; the descriptor is then
// disarmed until rearm(), so a handler does not run twice at a time.
//
// One descriptor may be the main one. A thread that waits for its result anyway
// can lead: it takes the main descriptor away from the other waiters and serves
// it itself (Lead), so that what it waits for needs no hand-off. Another thread
// may be in the main descriptor's handler at that moment: that handler must
// allow two threads at a time.
//
// Owns: the epoll descriptor, the handlers and the timers' queue, not the
//   descriptors.
// Thread: any.
// Outlives: whatever is registered.
class Poller {
 public:
  using Handler = std::function<void()>;

  Poller();
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Watches `fd` for input.
  void add(int fd, Handler handler);
  void addMain(int fd, Handler handler);
  void rearm(int fd);
  // The handler does not start after this returns, unless it had begun.
  void remove(int fd);

  // What ended a wait: an event, whose handler has run on this thread, wake(),
  // or the time (a signal counts as that).
  enum class Ended { kEvent, kWake, kTimeout };

  // `timeoutMs` -1 waits for ever.
  Ended wait(int timeoutMs = -1);

  // Ends one wait: of a thread that waits now, or else of the next that will.
  // Several calls before a thread has woken up end one wait together.
  void wake();

  // For Timer.
  TimerQueue& timers() {
    return *timers_;
  }

  class Lead;

 private:
  struct Entry {
    int fd;
    Handler handler;
  };

  std::shared_ptr<Entry> find(uint64_t key);
  void control(int operation, int fd, uint64_t key, uint32_t events);

  int epollFd_;
  int wakeFd_;
  std::mutex mutex_;
  int mainFd_ = -1;
  bool led_ = false; // the main descriptor is a leader's
  uint64_t nextKey_ = 1; // 0 is wakeFd_
  std::unordered_map<int, uint64_t> keys_; // by descriptor
  std::unordered_map<uint64_t, std::shared_ptr<Entry>> entries_;
  std::unique_ptr<TimerQueue> timers_;
};

// The main descriptor in the hands of one thread, until give() or destruction.
// Thread: the one that made it, except Signal.
class Poller::Lead {
 public:
  // Ends the leader's wait; may outlive it.
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

  // Takes the main descriptor, if there is one and nobody leads.
  Lead(Poller& poller, std::shared_ptr<Signal> signal);
  ~Lead() {
    give();
  }
  Lead(const Lead&) = delete;
  Lead& operator=(const Lead&) = delete;

  bool leads() const {
    return entry_ != nullptr;
  }
  // As Poller::wait(); kWake is the signal.
  Ended wait(int timeoutMs = -1);
  void give();

 private:
  Poller& poller_;
  const std::shared_ptr<Signal> signal_;
  std::shared_ptr<Entry> entry_;
};

} // namespace torch_rpc_ext::base
