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
  // Taken on a thread of its own: the first one to ask may be a user's.
  static const NewThread taken = [] {
    std::optional<NewThread> result;
    std::thread([&] {
      base::caughtHere(base::Boundary::kTask, [&] { result.emplace(); });
    }).join();
    // bad_optional_access: the next one to ask tries again.
    return result.value();
  }();
  return taken;
}

} // namespace

void restoreThreadState() {
  at::ThreadLocalState::setThreadLocalState(newThread().state);
  // What at::ThreadLocalState leaves out of autocast.
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
  // Whatever makes tensors other than ordinary ones changes the local keys.
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const auto& usual = newThread().keys;
  if (!(keys.included_ == usual.included_) ||
      !(keys.excluded_ == usual.excluded_)) {
    guard_.emplace(newThread().state);
  }
}

} // namespace torch_rpc_ext::agent
