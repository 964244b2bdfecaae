#include "agent/admission.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent {

// Shared by the Admission and all Rooms: a Room may outlive the Admission.
class Admission::State : public std::enable_shared_from_this<State> {
 public:
  explicit State(uint64_t budget)
      : budget_(budget), ahead_(std::min(kAheadBytes, budget / 2)) {}

  void request(Caller caller, uint64_t bytes, Then then) {
    std::vector<Admitted> admitted;
    {
      std::lock_guard lock(mutex_);
      if (stopped_) {
        return;
      }
      Queue& queue = queues_[caller];
      if (queue.waiting.empty()) {
        turns_.push_back(caller);
      }
      queue.waiting.push_back({bytes, std::move(then)});
      queue.load.waitingBytes += bytes;
      ++queue.load.waitingRequests;
      total_.waitingBytes += bytes;
      ++total_.waitingRequests;
      admitted = admitLocked();
    }
    run(std::move(admitted));
  }

  void grow(Caller caller, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    queues_[caller].load.heldBytes += bytes;
    total_.heldBytes += bytes;
  }

  void release(Caller caller, uint64_t bytes) {
    std::vector<Admitted> admitted;
    {
      std::lock_guard lock(mutex_);
      const auto queue = queues_.find(caller);
      queue->second.load.heldBytes -= bytes;
      total_.heldBytes -= bytes;
      eraseIfEmptyLocked(queue);
      admitted = admitLocked();
    }
    run(std::move(admitted));
  }

  void answering(Caller caller, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    Queue& queue = queues_[caller];
    queue.untakenBytes += bytes;
    ++queue.untakenAnswers;
  }

  void taken(Caller caller, uint64_t bytes) {
    std::vector<Admitted> admitted;
    {
      std::lock_guard lock(mutex_);
      const auto queue = queues_.find(caller);
      queue->second.untakenBytes -= bytes;
      --queue->second.untakenAnswers;
      eraseIfEmptyLocked(queue);
      admitted = admitLocked();
    }
    run(std::move(admitted));
  }

  void forget(Caller caller) {
    std::deque<Waiting> dropped; // destroyed without the lock: holds messages
    std::vector<Admitted> admitted;
    {
      std::lock_guard lock(mutex_);
      const auto queue = queues_.find(caller);
      if (queue == queues_.end() || queue->second.waiting.empty()) {
        return;
      }
      std::erase(turns_, caller);
      dropLocked(queue->second, dropped);
      eraseIfEmptyLocked(queue);
      admitted = admitLocked();
    }
    run(std::move(admitted));
  }

  void stop() {
    std::deque<Waiting> dropped;
    std::lock_guard lock(mutex_);
    stopped_ = true;
    turns_.clear();
    for (auto& [caller, queue] : queues_) {
      dropLocked(queue, dropped);
    }
  }

  Load load() const {
    std::lock_guard lock(mutex_);
    return total_;
  }

  std::map<Caller, Load> byCaller() const {
    std::map<Caller, Load> loads;
    std::lock_guard lock(mutex_);
    for (const auto& [caller, queue] : queues_) {
      loads.emplace(caller, queue.load);
    }
    return loads;
  }

 private:
  struct Waiting {
    uint64_t bytes;
    Then then;
  };
  struct Queue {
    std::deque<Waiting> waiting;
    Load load;
    uint64_t untakenBytes = 0;
    uint64_t untakenAnswers = 0;
  };
  using Queues = std::unordered_map<Caller, Queue>;
  using Admitted = std::pair<Room, Then>;

  static bool fits(uint64_t held, uint64_t bytes, uint64_t limit) {
    return held == 0 || (bytes <= limit && held <= limit - bytes);
  }

  void eraseIfEmptyLocked(Queues::iterator queue) {
    const Queue& state = queue->second;
    if (state.waiting.empty() && state.load.heldBytes == 0 &&
        state.untakenAnswers == 0) {
      queues_.erase(queue);
    }
  }

  void dropLocked(Queue& queue, std::deque<Waiting>& dropped) {
    total_.waitingBytes -= queue.load.waitingBytes;
    total_.waitingRequests -= queue.load.waitingRequests;
    queue.load.waitingBytes = queue.load.waitingRequests = 0;
    for (auto& waiting : queue.waiting) {
      dropped.push_back(std::move(waiting));
    }
    queue.waiting.clear();
  }

  std::vector<Admitted> admitLocked() {
    std::vector<Admitted> admitted;
    for (size_t passed = 0; passed < turns_.size();) {
      const Caller caller = turns_.front();
      Queue& queue = queues_[caller];
      const uint64_t bytes = queue.waiting.front().bytes;
      const bool mayHaveMore = fits(queue.load.heldBytes, bytes, ahead_) &&
          (queue.untakenAnswers < 2 || queue.untakenBytes <= kUntakenBytes);
      if (mayHaveMore && !fits(total_.heldBytes, bytes, budget_)) {
        break; // smaller requests must not overtake a large one for ever
      }
      turns_.pop_front();
      if (!mayHaveMore) {
        turns_.push_back(caller);
        ++passed;
        continue;
      }
      admitted.emplace_back(
          Room(shared_from_this(), caller, bytes),
          std::move(queue.waiting.front().then));
      queue.waiting.pop_front();
      for (Load* const load : {&queue.load, &total_}) {
        load->heldBytes += bytes;
        load->waitingBytes -= bytes;
        --load->waitingRequests;
      }
      if (!queue.waiting.empty()) {
        turns_.push_back(caller);
      }
      passed = 0;
    }
    return admitted;
  }

  static void run(std::vector<Admitted> admitted) {
    for (auto& [room, then] : admitted) {
      then(std::move(room));
    }
  }

  const uint64_t budget_;
  const uint64_t ahead_; // the most that one caller may hold
  mutable std::mutex mutex_;
  Queues queues_;
  std::deque<Caller> turns_; // the callers whose requests wait
  Load total_;
  bool stopped_ = false;
};

void Admission::Room::release() {
  if (const auto state = std::exchange(state_, nullptr)) {
    state->release(caller_, bytes_);
  }
}

Admission::Admission(uint64_t budget)
    : state_(
          std::make_shared<State>(
              budget == 0 ? std::numeric_limits<uint64_t>::max() : budget)) {}

void Admission::request(Caller caller, uint64_t bytes, Then then) {
  state_->request(caller, bytes, std::move(then));
}

void Admission::grow(Room& room, Caller caller, uint64_t bytes) {
  const uint64_t before = room.bytes();
  if (bytes > before) {
    state_->grow(caller, bytes - before);
    room.state_ = state_;
    room.caller_ = caller;
    room.bytes_ = bytes;
  }
}

Admission::Untaken Admission::answering(Caller caller, uint64_t bytes) {
  state_->answering(caller, bytes);
  return Untaken(nullptr, [state = state_, caller, bytes](void*) {
    state->taken(caller, bytes);
  });
}

void Admission::forget(Caller caller) {
  state_->forget(caller);
}

void Admission::stop() {
  state_->stop();
}

Admission::Load Admission::load() const {
  return state_->load();
}

std::map<Admission::Caller, Admission::Load> Admission::byCaller() const {
  return state_->byCaller();
}

} // namespace torch_rpc_ext::agent
