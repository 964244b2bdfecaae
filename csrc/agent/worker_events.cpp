#include "agent/worker_events.h"

#include <utility>

namespace torch_rpc_ext::agent {

bool WorkerEvents::isGone(const WorkerState& worker) {
  return worker.last == Kind::kLost || worker.last == Kind::kLeft;
}

void WorkerEvents::push(
    State& state,
    Workers::value_type& worker,
    Kind kind,
    std::string reason) {
  auto& [name, known] = worker;
  known.last = kind;
  known.reason = std::move(reason);
  if (state.kept && !state.ended) {
    state.events.push_back({kind, name, known.reason});
    changed_.notify_all();
  }
}

void WorkerEvents::added(const std::string& worker, uint32_t life) {
  auto state = state_.lock();
  const auto [it, isNew] =
      state->workers.try_emplace(worker, WorkerState{.life = life});
  if (isNew) {
    push(*state, *it, Kind::kJoined, "it joined the group");
    return;
  }
  WorkerState& known = it->second;
  if (life <= known.life) {
    return;
  }
  known.life = life;
  if (!isGone(known)) {
    push(*state, *it, Kind::kLost, "it died, and has been started again");
  }
  push(*state, *it, Kind::kReturned, "it has been started again");
}

void WorkerEvents::removed(const std::string& worker) {
  auto state = state_.lock();
  const auto it = state->workers.find(worker);
  if (it == state->workers.end()) {
    return;
  }
  if (it->second.last != Kind::kLeft) {
    push(*state, *it, Kind::kLeft, "it left the group");
  }
  state->workers.erase(it);
}

void WorkerEvents::unreachable(
    const std::string& worker,
    bool left,
    std::string reason) {
  auto state = state_.lock();
  const auto it = state->workers.find(worker);
  if (it == state->workers.end() || isGone(it->second) ||
      (left && state->groupEnds)) {
    return;
  }
  push(*state, *it, left ? Kind::kLeft : Kind::kLost, std::move(reason));
}

void WorkerEvents::heardOf(const std::string& worker) {
  auto state = state_.lock();
  const auto it = state->workers.find(worker);
  if (it != state->workers.end() && isGone(it->second)) {
    push(*state, *it, Kind::kReturned, "it is reachable again");
  }
}

void WorkerEvents::groupEnds() {
  state_.lock()->groupEnds = true;
}

void WorkerEvents::begin() {
  auto state = state_.lock();
  if (!state->kept) {
    state->kept = true;
    for (const auto& [name, known] : state->workers) {
      if (known.last == Kind::kLost) {
        state->events.push_back({known.last, name, known.reason});
      }
    }
  }
  state->events.push_back({Kind::kBegan});
  changed_.notify_all();
}

std::optional<WorkerEvents::Event> WorkerEvents::next(
    std::chrono::milliseconds patience) {
  auto state = state_.lock();
  state.waitFor(changed_, patience, [&] {
    return state->ended || !state->events.empty();
  });
  if (!state->events.empty()) {
    Event event = std::move(state->events.front());
    state->events.pop_front();
    return event;
  }
  return state->ended ? std::optional(Event{}) : std::nullopt;
}

void WorkerEvents::end() {
  auto state = state_.lock();
  state->ended = true;
  changed_.notify_all();
}

} // namespace torch_rpc_ext::agent
