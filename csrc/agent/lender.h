#pragma once

#include "agent/codec.h"
#include "agent/one_copy.h"
#include "base/poller.h"
#include "base/synchronized.h"
#include "base/task.h"
#include "base/timer.h"
#include "memory/buffer_cache.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>

namespace torch_rpc_ext::agent {

// Copies bulk into shared memory, which a receiver on this host maps instead of
// reading ours: a plain copy takes a quarter of the time of one that has to
// pin each page of another process. The copy is the receiver's value: what was
// copied may be written to, or freed, at once.
//
// If no block is free for a message, the message waits for one to come back: a
// block that was used before is many times faster to fill than a fresh one, and
// than a read by the receiver into fresh memory. But a receiver may keep what
// it has been lent for as long as it likes. So messages wait only while blocks
// come back, one after another, in less time than fresh memory would cost. If
// none does, all that wait are sent without a copy, and their receivers read
// them; further messages do not wait until a block has come back.
//
// Owns: the messages that wait.
// Thread: any.
// Outlives: nothing, once stop() has dropped the messages that wait. (A thread
//   that gives a block back may be the last to hold a Lender.)
class Lender : public std::enable_shared_from_this<Lender> {
 public:
  // `runner` and `poller` outlive stop().
  static std::shared_ptr<Lender> create(
      std::shared_ptr<memory::BufferCache> cache,
      base::TaskRunner& runner,
      base::Poller& poller);

  using Then = std::function<void(Encoded)>;
  // Calls `then` when the bulk is ready to be sent: with the copies, or with
  // the bulk itself where there is no shared memory for it. At once, or, when
  // there is much to copy, or the message has to wait, later on the runner.
  void lend(Encoded encoded, Then then);

  // Drops the messages that wait: `then` is destroyed without a call.
  void stop();

  struct Load {
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };
  // The messages that wait for memory.
  Load waiting() const;

 private:
  using Clock = base::Timer::Clock;
  struct Waiting {
    Encoded encoded;
    Then then;
    uint64_t bytes;
  };
  // The messages that wait for blocks of one size class, in their order, at
  // least one; and when the last block came back, or the first message came.
  struct Queue {
    std::deque<Waiting> messages;
    Clock::time_point since;
    Clock::time_point until() const;
  };
  using Queues = std::map<size_t, Queue>;
  struct State {
    Queues queues; // by the class of a message's largest block
    // The classes of which no block has come back since messages waited in
    // vain.
    std::set<size_t> stalled;
    bool stopped = false;
  };

  Lender(
      std::shared_ptr<memory::BufferCache> cache,
      base::TaskRunner& runner,
      base::Poller& poller);
  bool tryToLend(Encoded& encoded, Then& then, uint64_t bytes);
  void lendCommon(OneCopy& common, Encoded encoded, Then then);
  void returned(size_t capacity, bool isIdle);
  void serve(size_t capacity, bool isIdle);
  void expire();
  // Where a message waits: behind the others of its queue, or before them.
  enum class Place : bool { kLast, kFirst };
  void add(State& state, size_t capacity, Waiting waiting, Place place);
  Waiting takeFirst(State& state, Queues::iterator queue);
  void setAnyWaits(const State& state);
  void setTimer(const State& state);

  const std::shared_ptr<memory::BufferCache> cache_;
  base::TaskRunner& runner_;
  base::Synchronized<State> state_;
  // Whether State::queues or State::stalled has anything: asked without the
  // lock.
  std::atomic<bool> anyWaits_{false};
  base::Timer timer_; // last: its handler uses the others
};

} // namespace torch_rpc_ext::agent
