#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

namespace torch_rpc_ext::agent {

// Counts the bytes of requests that wait here because they cannot wait at their
// senders, as the large tensors do that nobody has received (Admission). There
// are two kinds:
//  - The frames of requests that no thread serves yet: the receiver learns of a
//    frame by receiving it.
//  - Requests that a thread has read and whose functions have not begun:
//    whether a request has to wait for its function is known when it is read.
// Further calls are refused (Server) when the bytes exceed a limit: the budget,
// but at least kLeastLimit, so that nested calls work with any budget.
//
// Thread: any.
class WaitingBytes {
  using Bytes = std::shared_ptr<std::atomic<uint64_t>>;

 public:
  // Counts one request for as long as the Held lives.
  class Held {
   public:
    Held() = default;
    Held(Held&& other) noexcept
        : all_(std::move(other.all_)), bytes_(other.bytes_) {}
    Held& operator=(Held&& other) noexcept {
      std::swap(all_, other.all_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Held() {
      release();
    }
    uint64_t bytes() const {
      return all_ == nullptr ? 0 : bytes_;
    }
    void release() {
      if (const auto all = std::exchange(all_, nullptr)) {
        all->fetch_sub(bytes_, std::memory_order_relaxed);
      }
    }

   private:
    friend class WaitingBytes;
    Held(Bytes all, uint64_t bytes) : all_(std::move(all)), bytes_(bytes) {}

    Bytes all_; // null: counts nothing
    uint64_t bytes_ = 0;
  };

  static constexpr uint64_t kLeastLimit = uint64_t{64} << 20;

  // 0: no limit.
  explicit WaitingBytes(uint64_t budget)
      : limit_(
            budget == 0 ? std::numeric_limits<uint64_t>::max()
                        : std::max(budget, kLeastLimit)) {}

  Held hold(uint64_t bytes) {
    all_->fetch_add(bytes, std::memory_order_relaxed);
    return {all_, bytes};
  }
  uint64_t bytes() const {
    return all_->load(std::memory_order_relaxed);
  }
  bool exceeded() const {
    return bytes() > limit_;
  }
  uint64_t limit() const {
    return limit_;
  }

 private:
  const uint64_t limit_;
  const Bytes all_ = std::make_shared<std::atomic<uint64_t>>(0);
};

} // namespace torch_rpc_ext::agent
