#pragma once

#include "agent/device/streams.h"
#include "base/error.h"
#include "base/synchronized.h"

#include <condition_variable>
#include <functional>
#include <list>
#include <thread>

namespace torch_rpc_ext::agent::device {

// Runs callbacks once events of devices are complete. One thread queries all
// events and sleeps in between, for a share of the time that it has waited. The
// thread starts with the first event.
//
// Owns: the events, their callbacks and the thread.
// Thread: any.
class EventWaiter {
 public:
  // Gets the error if a device reports one instead of completing the events.
  // Must not block. If it throws, it is called once more with that error.
  using Done = std::function<void(const base::Error&)>;

  EventWaiter() = default;
  ~EventWaiter();
  EventWaiter(const EventWaiter&) = delete;
  EventWaiter& operator=(const EventWaiter&) = delete;

  // `done` runs on the thread of this object; after stop() it runs at once,
  // with kShutDown.
  void whenComplete(Events events, Done done);

  // Whether the events complete, without an error, within the time in which a
  // small copy does. Asks on this thread, which takes less time than to wake
  // another one.
  static bool completeSoon(const Events& events);

  // Gives events that are not complete a little time, then calls their `done`
  // with kShutDown. Ends the thread.
  void stop();

 private:
  struct Waiting {
    Events events;
    Done done;
  };
  using List = std::list<Waiting>;

  void main();

  struct State {
    List added;
    bool stopped = false;
    std::thread thread;
  };
  base::Synchronized<State> state_;
  std::condition_variable changed_;
};

} // namespace torch_rpc_ext::agent::device
