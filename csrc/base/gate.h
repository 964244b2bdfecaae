#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace torch_rpc_ext::base {

// Counts the threads that are inside of some code, so that whoever ends what
// that code uses can wait until all of them have left.
//
// Owns: the count.
// Thread: any.
// Outlives: everybody inside.
class Gate {
 public:
  // A thread that is inside, for as long as this object lives on its stack.
  class Inside {
   public:
    explicit Inside(Gate& gate);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

    // False: the gate was closed already, and nobody waits for this thread.
    bool counted() const {
      return counted_;
    }

   private:
    friend class Gate;

    Gate& gate_;
    const bool counted_;
    const Inside* const outer_; // the one around it on this thread
  };

  // From now on nobody is let in.
  void close();

  // Returns when the gate is closed and all threads but this one have left.
  // Several threads may wait, but only one of them from inside: two would wait
  // for each other.
  void wait();

  // Whether this thread is inside.
  bool holdsThisThread() const {
    return entriesOfThisThread() != 0;
  }

 private:
  bool enter();
  void leave();
  uint64_t entriesOfThisThread() const;

  // Twice the number of those inside, plus 1 when it is closed: an open gate is
  // passed without taking the mutex.
  std::atomic<uint64_t> state_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

} // namespace torch_rpc_ext::base
