#pragma once

#include <ATen/ThreadLocalState.h>

#include <optional>

namespace torch_rpc_ext::agent {

// The state that torch keeps for each thread: grad mode, inference mode,
// autocast, Python modes (a default device is one), hooks, the profiler.

// Gives this thread the state of a new thread, so that nothing that user code
// has changed remains. Needs no GIL.
void restoreThreadState();

// All state of one thread.
struct ThreadState {
  at::ThreadLocalState torch;
  // The parts of autocast that at::ThreadLocalState does not contain: how many
  // contexts of autocast the thread is in, and whether it caches weights.
  int autocastNesting;
  bool autocastCaches;
};
// As restoreThreadState(), and returns the state that the thread had; nothing
// where that was the state of a new thread.
std::optional<ThreadState> takeThreadState();
// Gives this thread, which has the state of a new one, a state that was taken.
void giveBackThreadState(const ThreadState& state);

// While an OrdinaryTensors lives, its thread makes ordinary tensors, also
// within torch.inference_mode() or under a mode that makes its own tensors
// (FakeTensorMode). Costs almost nothing where no such mode is on.
class OrdinaryTensors {
 public:
  OrdinaryTensors();

 private:
  std::optional<at::ThreadLocalStateGuard> guard_;
};

} // namespace torch_rpc_ext::agent
