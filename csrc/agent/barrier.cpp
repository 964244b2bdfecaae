#include "agent/barrier.h"

#include <utility>

namespace torch_rpc_ext::agent {

void Barrier::arrive(
    size_t expected,
    uint64_t number,
    const std::string& worker,
    int64_t active,
    Answer answer) {
  Round complete;
  base::Error error;
  {
    std::lock_guard lock(mutex_);
    lost_.erase(worker);
    Round& round = rounds_[number];
    round.sum += active;
    round.arrived.insert(worker);
    round.answers.push_back(std::move(answer));
    for (const auto& [name, why] : lost_) {
      if (round.arrived.count(name) == 0) {
        error = why;
      }
    }
    if (round.arrived.size() < expected && !error) {
      return;
    }
    complete = std::move(round);
    rounds_.erase(number);
  }
  for (const auto& tell : complete.answers) {
    tell(error, complete.sum);
  }
}

void Barrier::lose(const std::string& worker, const base::Error& why) {
  std::vector<Answer> answers;
  {
    std::lock_guard lock(mutex_);
    lost_[worker] = why;
    for (auto it = rounds_.begin(); it != rounds_.end();) {
      auto current = it++;
      if (current->second.arrived.count(worker) == 0) {
        for (auto& answer : current->second.answers) {
          answers.push_back(std::move(answer));
        }
        rounds_.erase(current);
      }
    }
  }
  for (const auto& tell : answers) {
    tell(why, 0);
  }
}

void Barrier::regain(const std::string& worker) {
  std::lock_guard lock(mutex_);
  lost_.erase(worker);
}

} // namespace torch_rpc_ext::agent
