#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

namespace torch_rpc_ext::base {

// A value together with the mutex that guards the value. The value is reached
// only through a Locked, which holds the mutex: no function can forget to lock,
// and a private function that runs with the mutex held takes a reference to the
// value, which nobody has without the mutex. Also known as folly::Synchronized
// and kj::MutexGuarded.
//
// What the state of a class needs no mutex for (constants, atomics, objects
// that synchronize themselves) stands beside the Synchronized, not in it.
template <typename T>
class Synchronized {
 public:
  // Holds the mutex as long as this object lives, or until unlock().
  template <typename V>
  class [[nodiscard]] Locked {
   public:
    V* operator->() const {
      return &value_;
    }
    V& operator*() const {
      return value_;
    }
    // Gives the mutex back early. The value must not be used afterwards.
    void unlock() {
      lock_.unlock();
    }
    // Waits until `ready`, a bool(), returns true; the mutex is free meanwhile.
    template <typename Ready>
    void wait(std::condition_variable& changed, Ready&& ready) {
      changed.wait(lock_, std::forward<Ready>(ready));
    }
    // The same, for some time or until some time at most. False: `ready` still
    // returns false.
    template <typename Duration, typename Ready>
    bool waitFor(
        std::condition_variable& changed,
        const Duration& duration,
        Ready&& ready) {
      return changed.wait_for(lock_, duration, std::forward<Ready>(ready));
    }
    template <typename Time, typename Ready>
    bool waitUntil(
        std::condition_variable& changed,
        const Time& time,
        Ready&& ready) {
      return changed.wait_until(lock_, time, std::forward<Ready>(ready));
    }

   private:
    friend class Synchronized;
    Locked(std::mutex& mutex, V& value) : lock_(mutex), value_(value) {}

    std::unique_lock<std::mutex> lock_;
    V& value_;
  };

  Synchronized() = default;
  explicit Synchronized(T value) : value_(std::move(value)) {}

  Locked<T> lock() {
    return Locked<T>(mutex_, value_);
  }
  Locked<const T> lock() const {
    return Locked<const T>(mutex_, value_);
  }

 private:
  mutable std::mutex mutex_;
  T value_{};
};

} // namespace torch_rpc_ext::base
