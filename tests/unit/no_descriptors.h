#pragma once

#include "sanitize/stress.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace torch_rpc_ext::unit {

// While it lives, it has all descriptors that this process may have and that
// were free.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit few = before_;
    few.rlim_cur = std::min<rlim_t>(few.rlim_cur, 256);
    setrlimit(RLIMIT_NOFILE, &few);
    while (takeOne()) {
    }
    stress::require(errno == EMFILE, "too many open files");
  }
  ~NoDescriptors() {
    while (!taken_.empty()) {
      giveOneBack();
    }
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

  // False if none is free.
  bool takeOne() {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
      return false;
    }
    taken_.push_back(fd);
    return true;
  }
  void giveOneBack() {
    close(taken_.back());
    taken_.pop_back();
  }

 private:
  rlimit before_{};
  std::vector<int> taken_;
};

} // namespace torch_rpc_ext::unit
