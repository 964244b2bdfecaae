#pragma once

#include "base/error.h"
#include "base/synchronized.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace torch_rpc_ext::agent {

// The barrier of a group's shutdown, on the worker that leads the shutdown.
// Every member reports how many calls it has under way; when the last one has
// reported, all are told the sum. A sum of zero means that the group has come
// to rest.
//
// Owns: the incomplete rounds.
// Thread: any. Answers run without the lock held.
class Barrier {
 public:
  using Answer = std::function<void(const base::Error&, int64_t sum)>;

  explicit Barrier(std::string self) : self_(std::move(self)) {}

  // `worker` has reached `round` with `active` calls under way. `answer` runs
  // once `expected` workers have reached the round, or with an error if one of
  // these workers is lost. The answer of this worker itself runs last: this
  // worker may then end, and could not tell the others any more.
  void arrive(
      size_t expected,
      uint64_t round,
      const std::string& worker,
      int64_t active,
      Answer answer);

  // `worker` will not report any more: all workers that wait for it, now or in
  // later rounds, get `why`.
  void lose(const std::string& worker, const base::Error& why);
  // `worker` has come back.
  void regain(const std::string& worker);

 private:
  struct Round {
    int64_t sum = 0;
    std::set<std::string> arrived;
    std::deque<Answer> answers; // that of this worker is the last
  };
  struct State {
    std::unordered_map<uint64_t, Round> rounds;
    std::map<std::string, base::Error> lost; // by worker
  };

  const std::string self_;
  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::agent
