#include "agent/device/fill_level.h"

#include <algorithm>
#include <iterator>

namespace torch_rpc_ext::agent::device {

void FillLevel::whenFilled(uint64_t bytes, transport::Callback then) {
  base::Error error;
  {
    auto state = state_.lock();
    if (state->level < bytes) {
      if (!state->error) {
        state->waiting.emplace_back(bytes, std::move(then));
        return;
      }
      error = state->error;
    }
  }
  then(error);
}

void FillLevel::reached(uint64_t bytes) {
  Waiting ready;
  {
    auto state = state_.lock();
    state->level = bytes;
    Waiting& waiting = state->waiting;
    const auto still = std::stable_partition(
        waiting.begin(), waiting.end(), [bytes](const auto& one) {
          return one.first <= bytes;
        });
    ready.assign(
        std::make_move_iterator(waiting.begin()),
        std::make_move_iterator(still));
    waiting.erase(waiting.begin(), still);
  }
  for (const auto& [level, then] : ready) {
    then({});
  }
}

void FillLevel::failed(const base::Error& error) {
  Waiting ready;
  {
    auto state = state_.lock();
    state->error = error;
    ready.swap(state->waiting);
  }
  for (const auto& [level, then] : ready) {
    then(error);
  }
}

} // namespace torch_rpc_ext::agent::device
