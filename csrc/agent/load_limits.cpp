#include "agent/load_limits.h"

#include <algorithm>
#include <string>

namespace torch_rpc_ext::agent {

namespace {

// A signal does not end the wait for a condition variable.
constexpr std::chrono::milliseconds kLookEvery{100};

} // namespace

LoadLimits::LoadLimits(uint64_t maxCalls, uint64_t maxBytes)
    : maxCalls_(maxCalls), maxBytes_(maxBytes) {}

bool LoadLimits::fits(const Load& load, uint64_t bytes) const {
  return (maxCalls_ == 0 || load.calls < maxCalls_) &&
      (maxBytes_ == 0 || load.bytes == 0 || load.bytes + bytes <= maxBytes_);
}

base::Error LoadLimits::begin(
    worker_id_t to,
    uint64_t bytes,
    Clock::time_point deadline,
    const std::function<void()>& checkInterrupt) {
  for (bool first = true;; first = false) {
    auto state = state_.lock();
    Load& load = state->loads[to]; // stays valid while others enter theirs
    const auto goesOn = [&] { return state->stopped || fits(load, bytes); };
    if (!goesOn()) {
      state->heldBack += first ? 1 : 0;
      ++state->waiting;
      state.waitUntil(
          changed_, std::min(deadline, Clock::now() + kLookEvery), goesOn);
      --state->waiting;
    }
    if (goesOn()) {
      if (base::Error error = stopped(*state)) {
        return error;
      }
      ++load.calls;
      load.bytes += bytes;
      return {};
    }
    if (Clock::now() >= deadline) {
      return {
          base::ErrorKind::kOverloaded,
          std::to_string(load.calls) + " calls with " +
              std::to_string(load.bytes) +
              " bytes to this worker are under way, and there was no room for "
              "another until its time-out (options max_calls_in_flight, "
              "max_bytes_in_flight)"};
    }
    state.unlock(); // checkInterrupt() waits for the GIL
    checkInterrupt();
  }
}

void LoadLimits::end(worker_id_t to, uint64_t bytes) {
  auto state = state_.lock();
  Load& load = state->loads[to];
  --load.calls;
  load.bytes -= bytes;
  if (state->waiting != 0) {
    changed_.notify_all();
  }
}

void LoadLimits::stop() {
  auto state = state_.lock();
  state->stopped = true;
  changed_.notify_all();
}

base::Error LoadLimits::stopped() const {
  return stopped(*state_.lock());
}

base::Error LoadLimits::stopped(const State& state) {
  return state.stopped
      ? base::Error{base::ErrorKind::kShutDown, "this worker shut down"}
      : base::Error{};
}

uint64_t LoadLimits::heldBack() const {
  return state_.lock()->heldBack;
}

} // namespace torch_rpc_ext::agent
