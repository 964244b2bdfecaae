#include "agent/worker_events.h"

#include <utility>

namespace torch_rpc_ext::agent {

bool WorkerEvents::isGone(const State& state) {
  return state.last == Kind::kLost || state.last == Kind::kLeft;
}

void WorkerEvents::pushLocked(
    const std::string& worker,
    State& state,
    Kind kind,
    std::string reason) {
  state.last = kind;
  state.reason = std::move(reason);
  if (kept_ && !ended_) {
    events_.push_back({kind, worker, state.reason});
    changed_.notify_all();
  }
}

void WorkerEvents::added(const std::string& worker, uint32_t life) {
  std::lock_guard lock(mutex_);
  const auto [it, isNew] = workers_.try_emplace(worker, State{.life = life});
  State& state = it->second;
  if (isNew) {
    pushLocked(worker, state, Kind::kJoined, "it joined the group");
    return;
  }
  if (life <= state.life) {
    return;
  }
  state.life = life;
  if (!isGone(state)) {
    pushLocked(
        worker, state, Kind::kLost, "it died, and has been started again");
  }
  pushLocked(worker, state, Kind::kReturned, "it has been started again");
}

void WorkerEvents::removed(const std::string& worker) {
  std::lock_guard lock(mutex_);
  const auto it = workers_.find(worker);
  if (it == workers_.end()) {
    return;
  }
  if (it->second.last != Kind::kLeft) {
    pushLocked(worker, it->second, Kind::kLeft, "it left the group");
  }
  workers_.erase(it);
}

void WorkerEvents::unreachable(
    const std::string& worker,
    bool left,
    std::string reason) {
  std::lock_guard lock(mutex_);
  const auto it = workers_.find(worker);
  if (it == workers_.end() || isGone(it->second) || (left && groupEnds_)) {
    return;
  }
  pushLocked(
      worker, it->second, left ? Kind::kLeft : Kind::kLost, std::move(reason));
}

void WorkerEvents::heardOf(const std::string& worker) {
  std::lock_guard lock(mutex_);
  const auto it = workers_.find(worker);
  if (it != workers_.end() && isGone(it->second)) {
    pushLocked(worker, it->second, Kind::kReturned, "it is reachable again");
  }
}

void WorkerEvents::groupEnds() {
  std::lock_guard lock(mutex_);
  groupEnds_ = true;
}

void WorkerEvents::begin() {
  std::lock_guard lock(mutex_);
  if (!kept_) {
    kept_ = true;
    for (const auto& [worker, state] : workers_) {
      if (state.last == Kind::kLost) {
        events_.push_back({state.last, worker, state.reason});
      }
    }
  }
  events_.push_back({Kind::kBegan});
  changed_.notify_all();
}

std::optional<WorkerEvents::Event> WorkerEvents::next(
    std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(
      lock, patience, [this] { return ended_ || !events_.empty(); });
  if (!events_.empty()) {
    Event event = std::move(events_.front());
    events_.pop_front();
    return event;
  }
  return ended_ ? std::optional(Event{}) : std::nullopt;
}

void WorkerEvents::end() {
  std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

} // namespace torch_rpc_ext::agent
