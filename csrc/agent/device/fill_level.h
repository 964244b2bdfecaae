#pragma once

#include "transport/transport.h"

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Memory that is being filled, and whose writer reports how far it has got.
//
// Owns: the callbacks that wait for bytes.
// Thread: any; for the writer's methods, one thread at a time.
class FillLevel {
 public:
  // As transport::WhenFilled.
  void whenFilled(uint64_t bytes, transport::Callback then);

 protected:
  ~FillLevel() = default;
  // The writer has written the first `bytes`. Runs the callbacks that wait for
  // them.
  void reached(uint64_t bytes);
  // The writer will write no more. Runs all callbacks that wait for more, with
  // the error.
  void failed(const base::Error& error);

 private:
  using Waiting = std::vector<std::pair<uint64_t, transport::Callback>>;

  std::mutex mutex_;
  uint64_t level_ = 0;
  base::Error error_;
  Waiting waiting_;
};

} // namespace torch_rpc_ext::agent::device
