#include "agent/load_limits.h"

#include <string>

namespace torch_rpc_ext::agent {

LoadLimits::LoadLimits(uint64_t maxCalls, uint64_t maxBytes)
    : maxCalls_(maxCalls), maxBytes_(maxBytes) {}

bool LoadLimits::fits(const Load& load, uint64_t bytes) const {
  return (maxCalls_ == 0 || load.calls < maxCalls_) &&
      (maxBytes_ == 0 || load.bytes == 0 || load.bytes + bytes <= maxBytes_);
}

base::Error
LoadLimits::begin(worker_id_t to, uint64_t bytes, Clock::time_point deadline) {
  auto state = state_.lock();
  if (!fits(state->loads[to], bytes)) {
    ++state->heldBack;
    ++state->waiting;
    const bool room = state.waitUntil(changed_, deadline, [&] {
      return state->stopped || fits(state->loads[to], bytes);
    });
    --state->waiting;
    if (!room) {
      const Load& load = state->loads[to];
      return {
          base::ErrorKind::kOverloaded,
          std::to_string(load.calls) + " calls with " +
              std::to_string(load.bytes) +
              " bytes to this worker are under way, and there was no room for "
              "another until its time-out (options max_calls_in_flight, "
              "max_bytes_in_flight)"};
    }
  }
  if (base::Error error = stopped(*state)) {
    return error;
  }
  Load& load = state->loads[to];
  ++load.calls;
  load.bytes += bytes;
  return {};
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
