#pragma once

#include <ATen/ThreadLocalState.h>

#include <optional>

namespace torch_rpc_ext::agent {

// The state that torch keeps for each thread: grad mode, inference mode,
// autocast, the modes of Python (a default device is one of them), hooks, what
// the profiler records.

// Gives a thread of the pool the state of a new thread, whatever user code has
// left on it. Needs no GIL.
void restoreThreadState();

// On any thread: while it lives, tensors that are made are ordinary ones, also
// within torch.inference_mode() or under a mode that makes tensors of its own
// (FakeTensorMode). Costs nothing on a thread where they are ordinary anyway.
class OrdinaryTensors {
 public:
  OrdinaryTensors();

 private:
  std::optional<at::ThreadLocalStateGuard> guard_;
};

} // namespace torch_rpc_ext::agent
