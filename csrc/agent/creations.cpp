#include "agent/creations.h"

#include "base/boundary.h"

#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

// Shared by the Creations and every Begun: a Begun may outlive the Creations.
class Creations::State {
  struct Queue {
    uint64_t next = 0;
    std::set<uint64_t> begun; // and not ended
    // Each waits for the end of all requests with a lower number.
    std::deque<std::pair<uint64_t, std::function<void()>>> waiting;
  };

 public:
  uint64_t begin(Caller caller) {
    std::lock_guard lock(mutex_);
    Queue& queue = queues_[caller];
    queue.begun.insert(queue.next);
    return queue.next++;
  }

  void end(Caller caller, uint64_t number) {
    std::vector<std::function<void()>> ready;
    {
      std::lock_guard lock(mutex_);
      const auto found = queues_.find(caller);
      Queue& queue = found->second;
      queue.begun.erase(number);
      while (!queue.waiting.empty() &&
             (queue.begun.empty() ||
              *queue.begun.begin() >= queue.waiting.front().first)) {
        ready.push_back(std::move(queue.waiting.front().second));
        queue.waiting.pop_front();
      }
      if (queue.begun.empty()) {
        queues_.erase(found);
      }
    }
    // A destructor runs this, so no exception may leave.
    for (const auto& then : ready) {
      base::caughtHere(base::Boundary::kTask, then);
    }
  }

  void afterThose(Caller caller, std::function<void()> then) {
    {
      std::lock_guard lock(mutex_);
      if (stopped_) {
        return;
      }
      const auto found = queues_.find(caller);
      if (found != queues_.end()) {
        Queue& queue = found->second;
        queue.waiting.emplace_back(queue.next, std::move(then));
        return;
      }
    }
    then();
  }

  void stop() {
    std::vector<decltype(Queue::waiting)> dropped; // destroyed without the lock
    std::lock_guard lock(mutex_);
    stopped_ = true;
    for (auto& [caller, queue] : queues_) {
      dropped.push_back(std::exchange(queue.waiting, {}));
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Caller, Queue> queues_;
  bool stopped_ = false;
};

Creations::Creations() : state_(std::make_shared<State>()) {}

Creations::Begun Creations::begin(Caller caller) {
  return Begun(
      nullptr, [state = state_, caller, number = state_->begin(caller)](void*) {
        state->end(caller, number);
      });
}

void Creations::afterThose(Caller caller, std::function<void()> then) {
  state_->afterThose(caller, std::move(then));
}

void Creations::stop() {
  state_->stop();
}

} // namespace torch_rpc_ext::agent
