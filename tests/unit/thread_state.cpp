// restoreThreadState() undoes each change that torch lets a thread make to its
// state, alone: no change hides behind another one.

#include "agent/thread_state.h"
#include "sanitize/stress.h"

#include <ATen/DTensorState.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/PythonDispatcherTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

using namespace torch_rpc_ext;
using at::impl::PythonTorchFunctionTLS;
using at::impl::ThreadLocalPythonObjects;
using c10::impl::TorchDispatchModeKey;
using c10::impl::TorchDispatchModeTLS;
using stress::require;

namespace {

c10::AutogradState& autograd() {
  return c10::AutogradState::get_tls_state();
}

// Has no Python object, so its destructor needs no interpreter.
c10::SafePyObject nothing() {
  return {nullptr, nullptr};
}

std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> dispatchMode() {
  return std::make_shared<c10::impl::PyObject_TorchDispatchMode>(
      nullptr, nullptr);
}

struct Functorch final : at::functorch::FuncTorchTLSBase {
  std::unique_ptr<FuncTorchTLSBase> deepcopy() const override {
    return std::make_unique<Functorch>();
  }
  int64_t checkSupportsSingleLevelAutogradFunction() const override {
    return 0;
  }
  void checkSupportsCppAutogradFunction() const override {}
  void checkSupportsInplaceRequiresGrad() const override {}
  void checkSupportsRetainGrad() const override {}
};

struct Case {
  std::string name;
  std::function<void()> change;
  std::function<bool()> isChanged;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"grad mode",
       [] { autograd().set_grad_mode(false); },
       [] { return !autograd().get_grad_mode(); }},
      {"forward grad mode",
       [] { autograd().set_fw_grad_mode(false); },
       [] { return !autograd().get_fw_grad_mode(); }},
      {"multithreading",
       [] { autograd().set_multithreading_enabled(false); },
       [] { return !autograd().get_multithreading_enabled(); }},
      {"view replay",
       [] { autograd().set_view_replay_enabled(true); },
       [] { return autograd().get_view_replay_enabled(); }},
      {"inference mode's flag",
       [] { autograd().set_inference_mode(true); },
       [] { return autograd().get_inference_mode(); }},
      {"inference mode",
       [] { new c10::InferenceMode(); },
       [] { return c10::InferenceMode::is_enabled(); }},
      {"autocast",
       [] { at::autocast::set_autocast_enabled(at::kCPU, true); },
       [] { return at::autocast::is_autocast_enabled(at::kCPU); }},
      {"autocast's type",
       [] { at::autocast::set_autocast_dtype(at::kCPU, at::kHalf); },
       [] { return at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf; }},
      {"autocast's cache",
       [] { at::autocast::set_autocast_cache_enabled(false); },
       [] { return !at::autocast::is_autocast_cache_enabled(); }},
      {"autocast's nesting",
       [] { at::autocast::increment_nesting(); },
       [] {
         at::autocast::increment_nesting();
         return at::autocast::decrement_nesting() != 0;
       }},
      {"autocast's nesting below 0",
       [] { at::autocast::decrement_nesting(); },
       [] {
         at::autocast::increment_nesting();
         return at::autocast::decrement_nesting() != 0;
       }},
      {"dispatch mode",
       [] {
         TorchDispatchModeTLS::push_non_infra_mode_onto_stack(dispatchMode());
       },
       [] { return TorchDispatchModeTLS::any_modes_set(); }},
      {"infra mode",
       [] {
         TorchDispatchModeTLS::set_mode(
             dispatchMode(), TorchDispatchModeKey::FAKE);
       },
       [] { return TorchDispatchModeTLS::any_modes_set(); }},
      {"Python's dispatcher",
       [] {
         static int interpreter = 0; // nobody looks into it
         c10::impl::PythonDispatcherTLS::set_state(
             reinterpret_cast<c10::impl::PyInterpreter*>(&interpreter));
       },
       [] { return c10::impl::PythonDispatcherTLS::get_state() != nullptr; }},
      {"no __torch_function__",
       [] {
         PythonTorchFunctionTLS::set_disabled_state(
             at::impl::TorchFunctionDisabledState::ALL_DISABLED);
       },
       [] { return at::impl::torch_function_all_disabled(); }},
      {"function mode",
       [] {
         PythonTorchFunctionTLS::push_onto_stack(
             std::make_shared<c10::SafePyObject>(nothing()));
       },
       [] { return PythonTorchFunctionTLS::stack_len() != 0; }},
      {"skip the next __torch_function__",
       [] { PythonTorchFunctionTLS::exchange_skip_next(true); },
       [] { return PythonTorchFunctionTLS::peek_skip_next(); }},
      {"hooks for saved tensors",
       [] {
         at::SavedTensorDefaultHooks::lazy_initialize();
         at::SavedTensorDefaultHooks::push_hooks(nothing(), nothing());
       },
       [] {
         return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
       }},
      {"no hooks for saved tensors",
       [] { at::SavedTensorDefaultHooks::disable("not here"); },
       [] { return !at::SavedTensorDefaultHooks::is_enabled(); }},
      {"tracing",
       [] { at::SavedTensorDefaultHooks::set_tracing(true); },
       [] { return at::SavedTensorDefaultHooks::get_tls_state().is_tracing; }},
      {"no recording",
       [] { at::enableRecordFunction(false); },
       [] { return !at::isRecordFunctionEnabled(); }},
      {"recorder",
       [] {
         at::addThreadLocalCallback(
             at::RecordFunctionCallback(
                 [](const at::RecordFunction&)
                     -> std::unique_ptr<at::ObserverContext> {
                   return nullptr;
                 }));
       },
       [] { return at::hasThreadLocalCallbacks(); }},
      {"debug info",
       [] {
         new c10::DebugInfoGuard(
             c10::DebugInfoKind::TEST_INFO,
             std::make_shared<c10::DebugInfoBase>());
       },
       [] { return c10::ThreadLocalDebugInfo::current() != nullptr; }},
      {"functorch",
       [] {
         at::functorch::functorchTLSAccessor() = std::make_unique<Functorch>();
       },
       [] { return at::functorch::functorchTLSAccessor() != nullptr; }},
      {"views in functionalization",
       [] {
         at::functionalization::impl::setFunctionalizationReapplyViewsTLS(true);
       },
       [] {
         return at::functionalization::impl::
             getFunctionalizationReapplyViewsTLS();
       }},
      {"DTensor's replication",
       [] { at::set_dtensor_allow_implicit_replication(true); },
       [] { return at::get_dtensor_allow_implicit_replication(); }},
      {"Python object",
       [] {
         ThreadLocalPythonObjects::set(
             "key", std::make_shared<c10::SafePyObject>(nothing()));
       },
       [] { return ThreadLocalPythonObjects::contains("key"); }},
  };
  return all;
}

} // namespace

int main() {
  for (const auto& entry : cases()) {
    const auto check = [&](bool holds, const char* what) {
      require(holds, (entry.name + ": " + what).c_str());
    };
    check(!entry.isChanged(), "a new thread has that");
    entry.change();
    check(entry.isChanged(), "the change has an effect");
    agent::restoreThreadState();
    check(!entry.isChanged(), "the change is undone");
    entry.change();
    const auto taken = agent::takeThreadState();
    check(taken.has_value(), "the change is taken");
    check(!entry.isChanged(), "the thread has no change any more");
    agent::giveBackThreadState(*taken);
    check(entry.isChanged(), "the change is given back");
    agent::restoreThreadState();
    check(!entry.isChanged(), "the change is undone again");
  }
}
