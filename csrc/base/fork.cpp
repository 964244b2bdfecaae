#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace torch_rpc_ext::base {

namespace {

// How many forks lie between the first use of HomeProcess and this process.
// Comparing pids would not do: a child in its own pid namespace may have the
// same pid as its parent.
std::atomic<uint32_t> forks{0};

uint32_t countForks() {
  [[maybe_unused]] static const int counting =
      ::pthread_atfork(nullptr, nullptr, []() noexcept { forks.fetch_add(1); });
  return forks.load();
}

} // namespace

HomeProcess::HomeProcess() : forks_(countForks()) {}

bool HomeProcess::isHere() const noexcept {
  return forks.load(std::memory_order_relaxed) == forks_;
}

} // namespace torch_rpc_ext::base
