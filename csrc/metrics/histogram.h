#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_rpc_ext::metrics {

// A histogram as it was at one moment.
struct Distribution {
  // counts[i] is the number of values greater than bounds[i - 1] and at most
  // bounds[i]. The last count has no upper bound.
  std::vector<uint64_t> bounds;
  std::vector<uint64_t> counts;
  uint64_t sum = 0;

  double mean() const {
    uint64_t n = 0;
    for (const uint64_t count : counts) {
      n += count;
    }
    return n == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(n);
  }
};

// Counts values in buckets whose upper bounds are First, 2 First, 4 First and
// so on. Adding a value takes two relaxed additions. Thread: any.
template <uint64_t First, size_t Bounds>
class Histogram {
 public:
  void add(uint64_t value) {
    const size_t bucket = value == 0
        ? 0
        : static_cast<size_t>(std::bit_width((value - 1) / First));
    counts_[bucket < Bounds ? bucket : Bounds].fetch_add(
        1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }
  // Adds a time in nanoseconds; a negative time counts as 0.
  void add(std::chrono::nanoseconds time) {
    add(time.count() < 0 ? 0 : static_cast<uint64_t>(time.count()));
  }

  Distribution read() const {
    Distribution now;
    for (size_t i = 0; i < Bounds; ++i) {
      now.bounds.push_back(First << i);
    }
    for (const auto& count : counts_) {
      now.counts.push_back(count.load(std::memory_order_relaxed));
    }
    now.sum = sum_.load(std::memory_order_relaxed);
    return now;
  }

 private:
  std::array<std::atomic<uint64_t>, Bounds + 1> counts_{};
  std::atomic<uint64_t> sum_{0};
};

// In ns: bounds from 1 us to 67 s.
using TimeHistogram = Histogram<1000, 27>;
// In bytes: bounds from 64 bytes to 16 GiB.
using SizeHistogram = Histogram<64, 29>;

} // namespace torch_rpc_ext::metrics
