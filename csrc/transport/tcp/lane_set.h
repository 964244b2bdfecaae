#pragma once

#include "base/gate.h"
#include "base/poller.h"
#include "base/task.h"
#include "transport/transport.h"

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace torch_rpc_ext::transport::tcp {

// Sockets whose events threads of the pool handle one piece of bulk at a time.
// In between, a thread that waits for the same core may run.
//
// Owns: an epoll descriptor, which the Poller watches; not the sockets.
// Thread: any.
// Outlives: nothing; the poller and the runner outlive stop().
class LaneSet : public std::enable_shared_from_this<LaneSet> {
 public:
  // The token that says that this thread has locked the set. Callbacks, which
  // must not run with the lock held, are deferred.
  class Locked {
   public:
    void defer(std::function<void()> callback) {
      deferred_.push_back(std::move(callback));
    }

   private:
    friend class LaneSet;
    explicit Locked(LaneSet& set) : lock_(set.mutex_) {}
    std::unique_lock<std::mutex> lock_;
    std::vector<std::function<void()>> deferred_;
  };

  // Handles one event, moving at most one piece.
  using Handle = std::function<void(Locked&, uint64_t id, uint32_t events)>;
  // Does one piece of work that waits for no event. False if there is none.
  using Work = std::function<bool(Locked&)>;

  static std::shared_ptr<LaneSet> create(
      base::Poller& poller,
      base::TaskRunner& runner,
      std::shared_ptr<base::Gate> gate,
      Handle handle,
      Work work);
  ~LaneSet();
  LaneSet(const LaneSet&) = delete;
  LaneSet& operator=(const LaneSet&) = delete;

  // Runs `operation`, a void(Locked&), and then what it has deferred.
  template <typename F>
  void run(F&& operation) {
    std::vector<std::function<void()>> deferred;
    {
      Locked locked(*this);
      operation(locked);
      deferred = std::move(locked.deferred_);
    }
    for (const auto& callback : deferred) {
      callback();
    }
  }

  void add(Locked&, int fd, uint64_t id, uint32_t events);
  void change(Locked&, int fd, uint64_t id, uint32_t events);
  // To be called before the socket is closed.
  void remove(Locked&, int fd);
  // Makes a thread do the work that waits for no event.
  void workSoon();
  // No event is handled any more, and no work is done.
  void stop(Locked&);

 private:
  LaneSet(
      base::Poller& poller,
      base::TaskRunner& runner,
      std::shared_ptr<base::Gate> gate,
      Handle handle,
      Work work);
  void serve();
  bool serveOne(Locked& locked);

  base::Poller& poller_;
  base::TaskRunner& runner_;
  const std::shared_ptr<base::Gate> gate_;
  const Handle handle_;
  const Work work_;
  const int epollFd_;
  std::atomic<bool> serving_{false}; // by a thread, or a task that is submitted
  std::atomic<bool> again_{false}; // there may be work
  std::mutex mutex_;
  bool stopped_ = false;
};

} // namespace torch_rpc_ext::transport::tcp
