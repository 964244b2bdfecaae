#pragma once

#include "base/boundary.h"
#include "base/descriptor.h"
#include "base/error.h"
#include "base/event_fd.h"
#include "base/gate.h"

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace torch_rpc_ext::transport::ucx::lanes {

// Sockets whose events one thread handles. The thread moves a piece of bulk at
// a time, and in between lets other threads run that wait for its core. The
// thread is not one of the pool, because one event soon follows another, and to
// wake a thread of the pool by way of the Poller takes two switches between
// threads for each event.
//
// Owns: the thread, which starts with the first socket; an epoll descriptor.
// Thread: any.
class LaneSet : public std::enable_shared_from_this<LaneSet> {
  using Deferred = std::function<void()>;

 public:
  // The token that says that this thread has locked the set. Callbacks, which
  // must not run with the lock held, are deferred.
  class Locked {
   public:
    void defer(Deferred callback) {
      deferred_.push_back(std::move(callback));
    }

   private:
    friend class LaneSet;
    Locked(LaneSet& set, std::vector<Deferred>& deferred)
        : lock_(set.mutex_), deferred_(deferred) {}
    const std::unique_lock<std::mutex> lock_;
    std::vector<Deferred>& deferred_;
  };

  // Handles one event, moving at most one piece.
  using Handle = std::function<void(Locked&, uint64_t id, uint32_t events)>;
  // Does one piece of work that waits for no event. False if there is no such
  // work.
  using Work = std::function<bool(Locked&)>;

  LaneSet(std::shared_ptr<base::Gate> gate, Handle handle, Work work);
  LaneSet(const LaneSet&) = delete;
  LaneSet& operator=(const LaneSet&) = delete;

  // Runs `operation`, a void(Locked&), and then what it has deferred, also if
  // it has thrown: the callback of a message that it has ended must fire.
  template <typename F>
  void run(F&& operation) {
    std::vector<Deferred> deferred;
    try {
      Locked locked(*this, deferred);
      operation(locked);
    } catch (...) {
      runAll(deferred);
      throw;
    }
    runAll(deferred);
  }

  // After an error the set does not know the descriptor.
  base::Error add(Locked& locked, int fd, uint64_t id, uint32_t events);
  void change(Locked&, int fd, uint64_t id, uint32_t events);
  // To be called before the socket is closed.
  void remove(Locked&, int fd);
  // Makes the thread do the work that waits for no event.
  void workSoon();
  // From now on no event is handled, and no work is done.
  void stop(Locked&);
  // To be called after stop(), and without the lock: waits for the thread,
  // unless this is the thread.
  void join();

 private:
  static void runAll(const std::vector<Deferred>& callbacks) {
    for (const auto& callback : callbacks) {
      base::caughtHere(base::Boundary::kDeferred, callback);
    }
  }

  void serve();
  bool serveOne(Locked& locked);

  const std::shared_ptr<base::Gate> gate_;
  const Handle handle_;
  const Work work_;
  const base::Descriptor epoll_;
  base::EventFd wakeEvent_;
  std::atomic<bool> wakes_{false}; // wakeEvent_ will wake the thread
  std::mutex mutex_;
  std::thread thread_;
  bool stopped_ = false;
};

} // namespace torch_rpc_ext::transport::ucx::lanes
