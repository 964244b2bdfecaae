#pragma once

#include "base/error.h"

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent {

// The leader's side of shutdown: all members report how many calls they have
// under way, and all learn the sum once the last has reported. The group has
// come to rest when the sum is zero.
//
// Owns: the rounds that are not complete.
// Thread: any. Answers run without its lock.
class Barrier {
 public:
  using Answer = std::function<void(const base::Error&, int64_t sum)>;

  // `worker` of a group of `expected` members has reached `round`.
  void arrive(
      size_t expected,
      uint64_t round,
      const std::string& worker,
      int64_t active,
      Answer answer);

  // `worker` will not come any more: who waits for it, now or later, learns so.
  void lose(const std::string& worker, const base::Error& why);
  // It has come back.
  void regain(const std::string& worker);

 private:
  struct Round {
    int64_t sum = 0;
    std::set<std::string> arrived;
    std::vector<Answer> answers;
  };

  std::mutex mutex_;
  std::unordered_map<uint64_t, Round> rounds_;
  std::map<std::string, base::Error> lost_; // workers
};

} // namespace torch_rpc_ext::agent
