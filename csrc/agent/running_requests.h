#pragma once

#include "base/synchronized.h"

#include <cstddef>
#include <list>
#include <map>
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
      auto labels = requests_.labels_.lock();
      at_ = labels->insert(labels->end(), std::move(label));
    }
    ~Entry() {
      requests_.labels_.lock()->erase(at_);
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
      const auto labels = labels_.lock();
      for (const auto& label : *labels) {
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
  base::Synchronized<std::list<std::string>> labels_;
};

} // namespace torch_rpc_ext::agent
