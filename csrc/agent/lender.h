#pragma once

#include "agent/codec.h"
#include "base/task.h"
#include "memory/buffer_cache.h"

#include <cstdint>
#include <functional>

namespace torch_rpc_ext::agent {

// Copies bulk into shared memory, which a receiver on this host maps instead of
// reading ours: a plain copy takes a quarter of the time of one that has to
// pin each page of another process. The copy is the receiver's value: what was
// copied may be written to, or freed, at once.
//
// Thread: any.
class Lender {
 public:
  // Both outlive it.
  Lender(memory::BufferCache& cache, base::TaskRunner& runner)
      : cache_(cache), runner_(runner) {}

  using Then = std::function<void(Encoded)>;
  // Calls `then` when the bulk is ready to be sent: with the copies, or with
  // the bulk itself where there is no shared memory for it. At once, or, when
  // there is much to copy, later on the runner.
  void lend(Encoded encoded, Then then);

 private:
  memory::BufferCache& cache_;
  base::TaskRunner& runner_;
};

} // namespace torch_rpc_ext::agent
