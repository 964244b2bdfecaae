#pragma once

#include "base/synchronized.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>

namespace torch_rpc_ext::base {

// Counts the threads that run a section of code, so that the thread that
// destroys what this code uses can first wait until all of them have left.
//
// Owns: the count.
// Thread: any.
// Outlives: every Inside.
class Gate {
 public:
  // The thread that makes this object is inside until the object dies. The
  // object must live on that thread's stack.
  class Inside {
   public:
    explicit Inside(Gate& gate);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

    // False if the gate was closed already: wait() then does not wait for this
    // thread.
    bool counted() const {
      return counted_;
    }

   private:
    friend class Gate;

    Gate& gate_;
    const bool counted_;
    // The next Inside further out on this thread's stack, of any gate.
    const Inside* const outer_;
  };

  // From now on no thread gets in.
  void close();

  // Returns when the gate is closed and all threads but this one have left.
  // Several threads may wait, but at most one of them may be inside: two of
  // them would wait for each other. The last one of them to return may destroy
  // the gate.
  void wait();

  // Whether this thread is inside.
  bool holdsThisThread() const {
    return entriesOfThisThread() != 0;
  }

 private:
  struct State {
    bool closed = false;
    uint64_t inside = 0; // once closed: how many Insides are still counted
  };

  bool enter();
  void leave();
  uint64_t entriesOfThisThread() const;

  // How many Insides are counted while the gate is open, then kClosed. An
  // atomic, so that passing an open gate takes no mutex.
  std::atomic<uint64_t> inside_{0};
  Synchronized<State> state_;
  std::condition_variable changed_;
};

} // namespace torch_rpc_ext::base
