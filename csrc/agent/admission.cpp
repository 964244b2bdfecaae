#include "agent/admission.h"

#include <algorithm>
#include <limits>

namespace torch_rpc_ext::agent {

namespace {

bool hasRoom(uint64_t held, uint64_t bytes, uint64_t limit) {
  return held == 0 || (bytes <= limit && held <= limit - bytes);
}

} // namespace

void Admission::Room::release() {
  if (const auto from = std::exchange(from_, nullptr)) {
    from->giveBack(caller_, bytes_);
  }
}

Admission::Admission(uint64_t budget)
    : budget_(budget), ahead_(std::min(kAheadBytes, budget / 2)) {}

std::shared_ptr<Admission> Admission::create(uint64_t budget) {
  return std::shared_ptr<Admission>(new Admission(
      budget == 0 ? std::numeric_limits<uint64_t>::max() : budget));
}

void Admission::request(Caller caller, uint64_t bytes, Then then) {
  std::vector<Admitted> admitted;
  {
    auto state = state_.lock();
    if (state->stopped) {
      return;
    }
    Queue& queue = state->queues[caller];
    if (queue.waiting.empty()) {
      state->turns.push_back(caller);
    }
    queue.waiting.push_back({bytes, std::move(then)});
    for (Load* const load : {&queue.load, &state->total}) {
      load->waitingBytes += bytes;
      ++load->waitingRequests;
    }
    admitted = admit(*state);
  }
  run(std::move(admitted));
}

void Admission::grow(Room& room, Caller caller, uint64_t bytes) {
  const uint64_t before = room.from_ == nullptr ? 0 : room.bytes_;
  if (bytes <= before) {
    return;
  }
  {
    auto state = state_.lock();
    state->queues[caller].load.heldBytes += bytes - before;
    state->total.heldBytes += bytes - before;
  }
  room.from_ = shared_from_this();
  room.caller_ = caller;
  room.bytes_ = bytes;
}

void Admission::giveBack(Caller caller, uint64_t bytes) {
  std::vector<Admitted> admitted;
  {
    auto state = state_.lock();
    const auto queue = state->queues.find(caller);
    queue->second.load.heldBytes -= bytes;
    state->total.heldBytes -= bytes;
    eraseIfEmpty(*state, queue);
    admitted = admit(*state);
  }
  run(std::move(admitted));
}

Admission::Untaken Admission::answering(Caller caller, uint64_t bytes) {
  {
    auto state = state_.lock();
    Queue& queue = state->queues[caller];
    queue.untakenBytes += bytes;
    ++queue.untakenAnswers;
  }
  return Untaken(nullptr, [self = shared_from_this(), caller, bytes](void*) {
    self->taken(caller, bytes);
  });
}

void Admission::taken(Caller caller, uint64_t bytes) {
  std::vector<Admitted> admitted;
  {
    auto state = state_.lock();
    const auto queue = state->queues.find(caller);
    queue->second.untakenBytes -= bytes;
    --queue->second.untakenAnswers;
    eraseIfEmpty(*state, queue);
    admitted = admit(*state);
  }
  run(std::move(admitted));
}

void Admission::forget(Caller caller) {
  std::deque<Waiting> dropped; // destroyed without the lock: holds messages
  std::vector<Admitted> admitted;
  {
    auto state = state_.lock();
    const auto queue = state->queues.find(caller);
    if (queue == state->queues.end() || queue->second.waiting.empty()) {
      return;
    }
    std::erase(state->turns, caller);
    drop(*state, queue->second, dropped);
    eraseIfEmpty(*state, queue);
    admitted = admit(*state);
  }
  run(std::move(admitted));
}

void Admission::stop() {
  std::deque<Waiting> dropped; // destroyed without the lock: holds messages
  auto state = state_.lock();
  state->stopped = true;
  state->turns.clear();
  for (auto& [caller, queue] : state->queues) {
    drop(*state, queue, dropped);
  }
}

Admission::Load Admission::load() const {
  return state_.lock()->total;
}

std::map<Admission::Caller, Admission::Load> Admission::byCaller() const {
  std::map<Caller, Load> loads;
  const auto state = state_.lock();
  for (const auto& [caller, queue] : state->queues) {
    loads.emplace(caller, queue.load);
  }
  return loads;
}

void Admission::eraseIfEmpty(State& state, Queues::iterator entry) {
  const Queue& queue = entry->second;
  if (queue.waiting.empty() && queue.load.heldBytes == 0 &&
      queue.untakenAnswers == 0) {
    state.queues.erase(entry);
  }
}

void Admission::drop(State& state, Queue& queue, std::deque<Waiting>& dropped) {
  state.total.waitingBytes -= queue.load.waitingBytes;
  state.total.waitingRequests -= queue.load.waitingRequests;
  queue.load.waitingBytes = queue.load.waitingRequests = 0;
  for (auto& waiting : queue.waiting) {
    dropped.push_back(std::move(waiting));
  }
  queue.waiting.clear();
}

std::vector<Admission::Admitted> Admission::admit(State& state) {
  std::vector<Admitted> admitted;
  for (size_t passed = 0; passed < state.turns.size();) {
    const Caller caller = state.turns.front();
    Queue& queue = state.queues[caller];
    const uint64_t bytes = queue.waiting.front().bytes;
    const bool mayHaveMore = hasRoom(queue.load.heldBytes, bytes, ahead_) &&
        (queue.untakenAnswers < 2 || queue.untakenBytes <= kUntakenBytes);
    if (mayHaveMore && !hasRoom(state.total.heldBytes, bytes, budget_)) {
      break; // smaller requests must not overtake a large one for ever
    }
    state.turns.pop_front();
    if (!mayHaveMore) {
      state.turns.push_back(caller);
      ++passed;
      continue;
    }
    admitted.emplace_back(
        Room(shared_from_this(), caller, bytes),
        std::move(queue.waiting.front().then));
    queue.waiting.pop_front();
    for (Load* const load : {&queue.load, &state.total}) {
      load->heldBytes += bytes;
      load->waitingBytes -= bytes;
      --load->waitingRequests;
    }
    if (!queue.waiting.empty()) {
      state.turns.push_back(caller);
    }
    passed = 0;
  }
  return admitted;
}

void Admission::run(std::vector<Admitted> admitted) {
  for (auto& [room, then] : admitted) {
    then(std::move(room));
  }
}

} // namespace torch_rpc_ext::agent
