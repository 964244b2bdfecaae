#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace torch_rpc_ext::base {

// A set of file descriptors that several threads wait on at once. Each event
// wakes one thread, which runs the descriptor's handler; the descriptor is then
// disarmed until rearm(), so a handler never runs twice at a time.
//
// Owns: the epoll descriptor and the handlers, not the descriptors.
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
  void rearm(int fd);
  // The handler does not start after this returns, unless it had begun.
  void remove(int fd);

  // What ended a wait: an event, whose handler has run on this thread, wake(),
  // or the time (a signal counts as that).
  enum class Ended { kEvent, kWake, kTimeout };

  // `timeoutMs` -1 waits for ever.
  Ended wait(int timeoutMs = -1);

  // Ends `count` present or future waits.
  void wake(uint64_t count = 1);

 private:
  struct Entry {
    int fd;
    Handler handler;
  };

  int epollFd_;
  int wakeFd_;
  std::mutex mutex_;
  uint64_t nextKey_ = 1; // 0 is wakeFd_
  std::unordered_map<int, uint64_t> keys_; // by descriptor
  std::unordered_map<uint64_t, std::shared_ptr<Entry>> entries_;
};

} // namespace torch_rpc_ext::base
