#include "agent/thread_state.h"
#include "base/boundary.h"
#include "compat/torch_compat.h"

#include <ATen/DTensorState.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PythonDispatcherTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/version.h>

#include <array>
#include <thread>

namespace torch_rpc_ext::agent {

namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 13
#define TORCH_RPC_EXT_KNOWS_THREAD_STATE
#endif

struct Keys {
  static Keys here() {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    return {keys.included_, keys.excluded_};
  }
  bool operator==(const Keys&) const = default;

  c10::DispatchKeySet included;
  c10::DispatchKeySet excluded;
};

#ifdef TORCH_RPC_EXT_KNOWS_THREAD_STATE
// What at::ThreadLocalState contains, as values that can be compared. For what
// a new thread has none of, only whether this thread has any.
struct Values {
  static Values here() {
    using at::impl::PythonTorchFunctionTLS;
    const auto& autograd = c10::AutogradState::get_tls_state();
    const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
    const auto& record = at::get_record_function_tls_();
    Values values{
        .keys = Keys::here(),
        .gradMode = autograd.get_grad_mode(),
        .inferenceMode = autograd.get_inference_mode(),
        .forwardGradMode = autograd.get_fw_grad_mode(),
        .multithreading = autograd.get_multithreading_enabled(),
        .viewReplay = autograd.get_view_replay_enabled(),
        .gradLayout = autograd.get_grad_layout_enforcement_enabled(),
        .graphGroup = autograd.get_graph_exec_group().has_value(),
        .dispatchModes = c10::impl::TorchDispatchModeTLS::any_modes_set(),
        .dispatcher = c10::impl::PythonDispatcherTLS::get_state(),
        .functionState = PythonTorchFunctionTLS::get_disabled_state(),
        .functionModes = PythonTorchFunctionTLS::stack_len(),
        .skipsNextFunction = PythonTorchFunctionTLS::peek_skip_next(),
        .savedTensorHooks = hooks.stack.size(),
        .noSavedTensorHooks = hooks.disabled_error_message.has_value(),
        .tracing = hooks.is_tracing,
        .records = record.tls_record_function_enabled_,
        .recorders = record.sorted_tls_callbacks_.size(),
        .debugInfo = c10::ThreadLocalDebugInfo::current() != nullptr,
        .functorch = at::functorch::functorchTLSAccessor() != nullptr,
        .reapplyViews =
            at::functionalization::impl::getFunctionalizationReapplyViewsTLS(),
        .implicitReplication = at::get_dtensor_allow_implicit_replication(),
        .pythonObjects = compat::hasThreadLocalPythonObjects()};
    for (size_t type = 0; type < values.autocastTypes.size(); ++type) {
      values.autocastTypes[type] =
          at::autocast::get_autocast_dtype(static_cast<at::DeviceType>(type));
    }
    return values;
  }
  bool operator==(const Values&) const = default;

  Keys keys;
  bool gradMode;
  bool inferenceMode;
  bool forwardGradMode;
  bool multithreading;
  bool viewReplay;
  bool gradLayout;
  bool graphGroup;
  bool dispatchModes;
  c10::impl::PyInterpreter* dispatcher;
  at::impl::TorchFunctionDisabledState functionState;
  int64_t functionModes;
  bool skipsNextFunction;
  size_t savedTensorHooks;
  bool noSavedTensorHooks;
  bool tracing;
  bool records;
  size_t recorders;
  bool debugInfo;
  bool functorch;
  bool reapplyViews;
  bool implicitReplication;
  bool pythonObjects;
  std::array<at::ScalarType, at::COMPILE_TIME_MAX_DEVICE_TYPES> autocastTypes{};
};
#else
// Nobody has checked that Values covers all of at::ThreadLocalState in this
// release of torch. So a thread's state always counts as changed.
struct Values {
  static Values here() {
    return {};
  }
  bool operator==(const Values&) const {
    return false;
  }
};
#endif

struct NewThread {
  at::ThreadLocalState state;
  Keys keys = Keys::here();
  Values values = Values::here();
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

int autocastNesting() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

void setAutocastNesting(int nesting) {
  int now = autocastNesting();
  while (now > nesting) {
    now = at::autocast::decrement_nesting();
  }
  while (now < nesting) {
    now = at::autocast::increment_nesting();
  }
}

// The parts of autocast that at::ThreadLocalState does not contain.
void restoreAutocast() {
  at::autocast::set_autocast_cache_enabled(true);
  if (autocastNesting() != 0) {
    setAutocastNesting(0);
    at::autocast::clear_cache();
  }
}

} // namespace

void restoreThreadState() {
  // Setting the state takes about as many instructions as all of our other code
  // needs for a small request. Comparing takes a third of that.
  if (Values::here() != newThread().values) {
    at::ThreadLocalState::setThreadLocalState(newThread().state);
  }
  restoreAutocast();
}

std::optional<ThreadState> takeThreadState() {
  const int nesting = autocastNesting();
  const bool caches = at::autocast::is_autocast_cache_enabled();
  if (nesting == 0 && caches && Values::here() == newThread().values) {
    return std::nullopt;
  }
  ThreadState taken{
      .torch = {}, .autocastNesting = nesting, .autocastCaches = caches};
  restoreThreadState();
  return taken;
}

void giveBackThreadState(const ThreadState& state) {
  at::ThreadLocalState::setThreadLocalState(state.torch);
  at::autocast::set_autocast_cache_enabled(state.autocastCaches);
  setAutocastNesting(state.autocastNesting);
}

OrdinaryTensors::OrdinaryTensors() {
  // Every mode that makes other than ordinary tensors changes the local
  // dispatch keys.
  if (Keys::here() != newThread().keys) {
    guard_.emplace(newThread().state);
  }
}

} // namespace torch_rpc_ext::agent
