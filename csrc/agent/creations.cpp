#include "agent/creations.h"

#include "base/boundary.h"

#include <vector>

namespace torch_rpc_ext::agent {

std::shared_ptr<Creations> Creations::create() {
  return std::shared_ptr<Creations>(new Creations());
}

Creations::Begun Creations::begin(Caller caller) {
  uint64_t number = 0;
  {
    auto state = state_.lock();
    Queue& queue = state->queues[caller];
    number = queue.next++;
    queue.begun.insert(number);
  }
  // Points to something, because a Begun that is null ends nothing.
  return Begun(this, [self = shared_from_this(), caller, number](void*) {
    self->end(caller, number);
  });
}

void Creations::end(Caller caller, uint64_t number) {
  std::vector<std::function<void()>> ready;
  {
    auto state = state_.lock();
    const auto found = state->queues.find(caller);
    Queue& queue = found->second;
    queue.begun.erase(number);
    while (!queue.waiting.empty() &&
           (queue.begun.empty() ||
            *queue.begun.begin() >= queue.waiting.front().first)) {
      ready.push_back(std::move(queue.waiting.front().second));
      queue.waiting.pop_front();
    }
    if (queue.begun.empty()) {
      state->queues.erase(found);
    }
  }
  // A destructor runs this, so no exception may leave.
  for (const auto& then : ready) {
    base::caughtHere(base::Boundary::kTask, then);
  }
}

void Creations::afterBegun(Caller caller, std::function<void()> then) {
  {
    auto state = state_.lock();
    if (state->stopped) {
      return;
    }
    const auto found = state->queues.find(caller);
    if (found != state->queues.end()) {
      Queue& queue = found->second;
      queue.waiting.emplace_back(queue.next, std::move(then));
      return;
    }
  }
  then();
}

void Creations::stop() {
  std::vector<decltype(Queue::waiting)> dropped; // destroyed without the lock
  auto state = state_.lock();
  state->stopped = true;
  for (auto& [caller, queue] : state->queues) {
    dropped.push_back(std::exchange(queue.waiting, {}));
  }
}

} // namespace torch_rpc_ext::agent
