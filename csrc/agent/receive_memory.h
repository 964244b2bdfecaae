#pragma once

#include "agent/admission.h"
#include "agent/agent_metrics.h"
#include "agent/agent_options.h"
#include "agent/lender.h"
#include "base/poller.h"
#include "base/task.h"
#include "base/timer.h"
#include "memory/buffer_cache.h"

#include <atomic>
#include <functional>
#include <memory>

namespace torch_rpc_ext::agent {

// The memory in which the tensors of messages arrive: blocks, the requests that
// have room, and the return of idle blocks to the system. Copies that are lent
// to a receiver on this host take blocks here too.
//
// Owns: the cache of blocks, the admission of requests, the lender, a timer.
// Thread: any.
// Outlives: nothing; stop() detaches it from the Poller. A block lives as long
//   as the storage over it.
class ReceiveMemory {
 public:
  using Duration = base::Timer::Clock::duration;
  // Releases what other parts of the agent keep for messages and have not used
  // for `idle`. Returns whether they keep more, which can be released later.
  using TrimOthers = std::function<bool(Duration idle)>;

  ReceiveMemory(
      const AgentOptions& options,
      base::TaskRunner& runner,
      base::Poller& poller,
      TrimOthers trimOthers);

  const std::shared_ptr<memory::BufferCache>& cache() const {
    return cache_;
  }
  Admission& admission() {
    return *admission_;
  }
  Lender& lender() {
    return *lender_;
  }

  // To be called after memory has been taken: releases what has become idle,
  // after a while and then repeatedly, until nothing is kept.
  void trimLater();
  // Gives no more room to requests, lends and trims no more.
  void stop();
  // From here on, frees blocks that are given back instead of keeping them.
  void close();

  void addTo(Metrics& metrics) const;

 private:
  void trim();

  const Duration idle_;
  const TrimOthers trimOthers_;
  const std::shared_ptr<memory::BufferCache> cache_;
  const std::shared_ptr<Admission> admission_;
  const std::shared_ptr<Lender> lender_;
  std::atomic<bool> trimming_{false};
  base::Timer timer_; // last: its handler uses the others
};

} // namespace torch_rpc_ext::agent
