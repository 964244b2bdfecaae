#pragma once

// What the stress programs share. Each program lets threads do at the same time
// everything that they may do at the same time. The sanitizers find races and
// errors of memory; require() finds what was lost.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

namespace torch_rpc_ext::stress {

inline void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::abort();
  }
}

// Waits until `holds`, a bool(), returns true.
template <typename F>
void become(F&& holds, const char* what) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!holds()) {
    require(std::chrono::steady_clock::now() < deadline, what);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The seconds that the program shall run: its first argument.
inline double seconds(int count, char** arguments) {
  return count > 1 ? std::atof(arguments[1]) : 1;
}

// Threads that each repeat a function until the time is over.
class Crowd {
 public:
  using Source = std::minstd_rand;
  using Act = std::function<void(Source&)>;

  ~Crowd() {
    join();
  }

  void add(size_t threads, const Act& act) {
    for (size_t i = 0; i < threads; ++i) {
      threads_.emplace_back(
          [this, act, seed = static_cast<unsigned>(threads_.size() + 1)] {
            Source random(seed);
            while (!over_.load()) {
              act(random);
              acts_.fetch_add(1);
            }
          });
    }
  }

  // Returns how many times a function was run.
  uint64_t run(double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    join();
    return acts_.load();
  }

 private:
  void join() {
    over_.store(true);
    for (auto& thread : threads_) {
      thread.join();
    }
    threads_.clear();
  }

  std::atomic<bool> over_{false};
  std::atomic<uint64_t> acts_{0};
  std::vector<std::thread> threads_;
};

} // namespace torch_rpc_ext::stress
