#pragma once

#include "agent/device/streams.h"
#include "base/error.h"

#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

namespace torch_rpc_ext::agent::device {

// Runs something once events of devices are complete. One thread asks all
// events, and sleeps in between: at first for as long as a small copy takes,
// then longer. The thread exists from the first event on.
//
// Owns: the events and what waits for them.
// Thread: any.
class EventWaiter {
 public:
  // Gets the error that a device reports instead. Must not block. If it
  // throws, it is called once more, with what was thrown.
  using Done = std::function<void(const base::Error&)>;

  EventWaiter() = default;
  ~EventWaiter();
  EventWaiter(const EventWaiter&) = delete;
  EventWaiter& operator=(const EventWaiter&) = delete;

  // `done` runs on the thread of this object; after stop() it runs at once,
  // with kShutDown.
  void whenComplete(Events events, Done done);

  // Gives what is under way a little time; then everything else gets kShutDown.
  void stop();

 private:
  struct Waiting {
    Events events;
    Done done;
  };
  using List = std::list<Waiting>;

  void main();

  std::mutex mutex_;
  std::condition_variable changed_;
  List added_;
  bool stopped_ = false;
  std::thread thread_;
};

} // namespace torch_rpc_ext::agent::device
