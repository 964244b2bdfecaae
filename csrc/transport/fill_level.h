#pragma once

#include "transport/transport.h"

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport {

// A Filling whose writer says how far it is.
//
// Owns: what waits.
// Thread: any; the writer one at a time.
class FillLevel : public Filling {
 public:
  void whenFilled(uint64_t bytes, Callback then) override;

 protected:
  // The first `bytes` are there. Runs what waits for them.
  void reached(uint64_t bytes);
  // There will be no more. Runs all that waits for more, with the error.
  void failed(const base::Error& error);

 private:
  using Waiting = std::vector<std::pair<uint64_t, Callback>>;

  std::mutex mutex_;
  uint64_t level_ = 0;
  base::Error error_;
  Waiting waiting_;
};

} // namespace torch_rpc_ext::transport
