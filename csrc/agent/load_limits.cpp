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
  std::unique_lock lock(mutex_);
  if (!fits(loads_[to], bytes)) {
    ++heldBack_;
    ++waiting_;
    const bool room = changed_.wait_until(
        lock, deadline, [&] { return stopped_ || fits(loads_[to], bytes); });
    --waiting_;
    if (!room) {
      const Load& load = loads_[to];
      return {
          base::ErrorKind::kOverloaded,
          std::to_string(load.calls) + " calls with " +
              std::to_string(load.bytes) +
              " bytes to it are under way, and there was no room for another "
              "until its time-out (options max_calls_in_flight, "
              "max_bytes_in_flight)"};
    }
  }
  if (stopped_) {
    return {base::ErrorKind::kShutDown, "this worker shut down"};
  }
  Load& load = loads_[to];
  ++load.calls;
  load.bytes += bytes;
  return {};
}

void LoadLimits::end(worker_id_t to, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  Load& load = loads_[to];
  --load.calls;
  load.bytes -= bytes;
  if (waiting_ != 0) {
    changed_.notify_all();
  }
}

void LoadLimits::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

uint64_t LoadLimits::heldBack() const {
  std::lock_guard lock(mutex_);
  return heldBack_;
}

} // namespace torch_rpc_ext::agent
