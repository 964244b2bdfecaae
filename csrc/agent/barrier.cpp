#include "agent/barrier.h"

#include <utility>
#include <vector>

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
    auto state = state_.lock();
    state->lost.erase(worker);
    Round& round = state->rounds[number];
    round.sum += active;
    round.arrived.insert(worker);
    if (worker == self_) {
      round.answers.push_back(std::move(answer));
    } else {
      round.answers.push_front(std::move(answer));
    }
    for (const auto& [name, why] : state->lost) {
      if (round.arrived.count(name) == 0) {
        error = why;
      }
    }
    if (round.arrived.size() < expected && !error) {
      return;
    }
    complete = std::move(round);
    state->rounds.erase(number);
  }
  for (const auto& tell : complete.answers) {
    tell(error, complete.sum);
  }
}

void Barrier::lose(const std::string& worker, const base::Error& why) {
  std::vector<Answer> answers;
  {
    auto state = state_.lock();
    state->lost[worker] = why;
    for (auto it = state->rounds.begin(); it != state->rounds.end();) {
      auto current = it++;
      if (current->second.arrived.count(worker) == 0) {
        for (auto& answer : current->second.answers) {
          answers.push_back(std::move(answer));
        }
        state->rounds.erase(current);
      }
    }
  }
  for (const auto& tell : answers) {
    tell(why, 0);
  }
}

void Barrier::regain(const std::string& worker) {
  state_.lock()->lost.erase(worker);
}

} // namespace torch_rpc_ext::agent
