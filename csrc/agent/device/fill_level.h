#pragma once

#include "base/synchronized.h"
#include "transport/transport.h"

#include <cstdint>
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

  struct State {
    uint64_t level = 0;
    base::Error error;
    Waiting waiting;
  };
  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::agent::device
