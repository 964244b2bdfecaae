#include "agent/thread_state.h"
#include "base/boundary.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <thread>

namespace torch_rpc_ext::agent {

namespace {

struct NewThread {
  at::ThreadLocalState state;
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
};

const NewThread& newThread() {
  // Taken on a fresh thread: the thread that asks first may be a user's, with
  // modes set.
  static const NewThread taken = [] {
    std::optional<NewThread> result;
    std::thread([&] {
      base::caughtHere(base::Boundary::kTask, [&] { result.emplace(); });
    }).join();
    // Throws bad_optional_access if that failed; the next call tries again.
    return result.value();
  }();
  return taken;
}

} // namespace

void restoreThreadState() {
  at::ThreadLocalState::setThreadLocalState(newThread().state);
  // The parts of autocast that at::ThreadLocalState does not contain.
  at::autocast::set_autocast_cache_enabled(true);
  if (at::autocast::increment_nesting() > 1) {
    while (at::autocast::decrement_nesting() > 0) {
    }
    at::autocast::clear_cache();
  } else {
    at::autocast::decrement_nesting();
  }
}

OrdinaryTensors::OrdinaryTensors() {
  // Every mode that makes other than ordinary tensors changes the local
  // dispatch keys.
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const auto& usual = newThread().keys;
  if (!(keys.included_ == usual.included_) ||
      !(keys.excluded_ == usual.excluded_)) {
    guard_.emplace(newThread().state);
  }
}

} // namespace torch_rpc_ext::agent
