#include "agent/creations.h"

#include "base/boundary.h"

#include <algorithm>
#include <iterator>

namespace torch_rpc_ext::agent {

std::shared_ptr<Creations> Creations::create() {
  return std::shared_ptr<Creations>(new Creations());
}

std::shared_ptr<Creations::Begun> Creations::begin(Caller caller) {
  uint64_t number = 0;
  {
    auto state = state_.lock();
    Queue& queue = state->queues[caller];
    number = queue.next++;
    queue.unread.insert(number);
  }
  return std::make_shared<Begun>(shared_from_this(), caller, number);
}

void Creations::Begun::makes(const Id& rref) {
  if (creations_ != nullptr && !rref_) {
    rref_.emplace(rref);
    creations_->makes(caller_, number_, rref);
  }
}

void Creations::Begun::ended() {
  if (const auto creations = std::exchange(creations_, nullptr)) {
    creations->end(caller_, number_, rref_);
  }
}

void Creations::makes(Caller caller, uint64_t number, const Id& rref) {
  std::vector<Deletion> ready;
  {
    auto state = state_.lock();
    Queue& queue = state->queues.at(caller);
    queue.unread.erase(number);
    queue.making.try_emplace(rref);
    advance(queue, ready);
  }
  run(ready);
}

void Creations::end(
    Caller caller,
    uint64_t number,
    const std::optional<Id>& rref) {
  std::vector<Deletion> ready;
  {
    auto state = state_.lock();
    const auto found = state->queues.find(caller);
    if (found == state->queues.end()) {
      return; // the caller made one RRef twice, and the other request has ended
    }
    Queue& queue = found->second;
    if (!rref) {
      queue.unread.erase(number);
    } else if (
        const auto it = queue.making.find(*rref);
        it != queue.making.end()) { // else as above
      ready = std::move(it->second);
      queue.making.erase(it);
    }
    advance(queue, ready);
    if (queue.unread.empty() && queue.making.empty()) {
      state->queues.erase(found);
    }
  }
  run(ready);
}

void Creations::advance(Queue& queue, std::vector<Deletion>& ready) {
  auto& waiting = queue.waiting;
  while (!waiting.empty() &&
         (queue.unread.empty() ||
          *queue.unread.begin() >= waiting.front().before)) {
    Waiting& first = waiting.front();
    const auto it =
        first.rref ? queue.making.find(*first.rref) : queue.making.end();
    auto& to = it == queue.making.end() ? ready : it->second;
    to.push_back(std::move(first.then));
    waiting.pop_front();
  }
}

void Creations::run(const std::vector<Deletion>& ready) {
  // A destructor may call this, so no exception may leave.
  for (const auto& then : ready) {
    base::caughtHere(base::Boundary::kTask, then);
  }
}

void Creations::afterBegun(
    Caller caller,
    const std::function<std::optional<Id>()>& rref,
    std::function<void()> then) {
  std::vector<Deletion> ready;
  {
    auto state = state_.lock();
    if (state->stopped) {
      return;
    }
    const auto found = state->queues.find(caller);
    if (found == state->queues.end()) {
      ready.push_back(std::move(then));
    } else {
      Queue& queue = found->second;
      queue.waiting.push_back({queue.next, rref(), std::move(then)});
      advance(queue, ready);
    }
  }
  run(ready);
}

void Creations::stop() {
  std::vector<Deletion> dropped; // destroyed without the lock
  auto state = state_.lock();
  state->stopped = true;
  for (auto& [caller, queue] : state->queues) {
    for (auto& waiting : std::exchange(queue.waiting, {})) {
      dropped.push_back(std::move(waiting.then));
    }
    for (auto& [rref, deletions] : queue.making) {
      std::move(
          deletions.begin(), deletions.end(), std::back_inserter(dropped));
      deletions.clear();
    }
  }
}

} // namespace torch_rpc_ext::agent
