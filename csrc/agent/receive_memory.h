#pragma once

#include "agent/admission.h"
#include "agent/agent_metrics.h"
#include "agent/agent_options.h"
#include "base/poller.h"
#include "base/timer.h"
#include "memory/buffer_cache.h"

#include <atomic>
#include <functional>
#include <memory>

namespace torch_rpc_ext::agent {

// The memory that tensors of messages arrive in: its blocks, which requests
// have room in it, and how what lies idle goes back to the system. Copies that
// are lent to a receiver on this host are blocks of it too.
//
// Owns: the cache of blocks, the admission of requests, a timer.
// Thread: any.
// Outlives: nothing; stop() detaches it from the Poller. Storages keep their
//   blocks alive by themselves.
class ReceiveMemory {
 public:
  using Duration = base::Timer::Clock::duration;
  // Trims what other parts keep for messages, of what has been idle for so
  // long. Returns whether there is more, which may be idle later.
  using TrimOthers = std::function<bool(Duration idle)>;

  ReceiveMemory(
      const AgentOptions& options,
      base::Poller& poller,
      TrimOthers trimOthers);

  const std::shared_ptr<memory::BufferCache>& cache() const {
    return cache_;
  }
  Admission& admission() {
    return admission_;
  }
  const Admission& admission() const {
    return admission_;
  }

  // To be called where memory has been taken: looks after a while for what is
  // idle, again and again until nothing is kept.
  void trimLater();
  // No request gets room any more, and nothing is trimmed.
  void stop();
  // Keeps nothing that is given back from here on.
  void close();

  void addTo(Metrics& metrics) const;

 private:
  void trim();

  const Duration idle_;
  const TrimOthers trimOthers_;
  const std::shared_ptr<memory::BufferCache> cache_;
  Admission admission_;
  std::atomic<bool> trimming_{false};
  base::Timer timer_; // last: its handler uses the others
};

} // namespace torch_rpc_ext::agent
