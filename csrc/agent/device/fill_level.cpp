#include "agent/device/fill_level.h"

#include <algorithm>
#include <iterator>

namespace torch_rpc_ext::agent::device {

void FillLevel::whenFilled(uint64_t bytes, transport::Callback then) {
  base::Error error;
  {
    const std::lock_guard lock(mutex_);
    if (level_ < bytes) {
      if (!error_) {
        waiting_.emplace_back(bytes, std::move(then));
        return;
      }
      error = error_;
    }
  }
  then(error);
}

void FillLevel::reached(uint64_t bytes) {
  Waiting ready;
  {
    const std::lock_guard lock(mutex_);
    level_ = bytes;
    const auto still = std::stable_partition(
        waiting_.begin(), waiting_.end(), [bytes](const auto& waiting) {
          return waiting.first <= bytes;
        });
    ready.assign(
        std::make_move_iterator(waiting_.begin()),
        std::make_move_iterator(still));
    waiting_.erase(waiting_.begin(), still);
  }
  for (const auto& [level, then] : ready) {
    then({});
  }
}

void FillLevel::failed(const base::Error& error) {
  Waiting ready;
  {
    const std::lock_guard lock(mutex_);
    error_ = error;
    ready.swap(waiting_);
  }
  for (const auto& [level, then] : ready) {
    then(error);
  }
}

} // namespace torch_rpc_ext::agent::device
