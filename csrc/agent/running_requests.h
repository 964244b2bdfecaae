#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace torch_rpc_ext::agent {

// What the threads for requests are running, for a log message.
//
// Thread: any.
class RunningRequests {
 public:
  // Lives while a request runs.
  class Entry {
   public:
    Entry(RunningRequests& requests, std::string label) : requests_(requests) {
      std::lock_guard lock(requests_.mutex_);
      at_ = requests_.labels_.insert(requests_.labels_.end(), std::move(label));
    }
    ~Entry() {
      std::lock_guard lock(requests_.mutex_);
      requests_.labels_.erase(at_);
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    RunningRequests& requests_;
    std::list<std::string>::iterator at_;
  };

  // "3 x module.function, 1 x aten::add"; empty when none runs.
  std::string describe() const {
    std::map<std::string, size_t> counts;
    {
      std::lock_guard lock(mutex_);
      for (const auto& label : labels_) {
        ++counts[label];
      }
    }
    std::string text;
    for (const auto& [label, count] : counts) {
      text +=
          (text.empty() ? "" : ", ") + std::to_string(count) + " x " + label;
    }
    return text;
  }

 private:
  mutable std::mutex mutex_;
  std::list<std::string> labels_;
};

} // namespace torch_rpc_ext::agent
