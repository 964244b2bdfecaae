#pragma once

#include "agent/ucx_agent.h"
#include "base/fork.h"

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>

namespace torch_rpc_ext::bindings {

// The future of rpc_async(), in Python a subclass of torch._C.Future. A thread
// that waits for upstream's future sleeps until another thread has taken the
// answer and completed the future, which takes two wake-ups. Here the thread
// that waits takes the answer itself, as in rpc_sync(), and Ctrl-C ends its
// wait.
//
// Thread: any.
class CallFuture final : public torch::jit::PythonFutureWrapper {
 public:
  // `future` is of the call that this thread has just sent by `agent`.
  CallFuture(
      const std::shared_ptr<torch::distributed::rpc::RpcAgent>& agent,
      c10::intrusive_ptr<torch::distributed::rpc::JitFuture> future,
      std::optional<UnwrapFunc> unwrap);

  // Returns the result, or throws the error, of the call. Throws in a process
  // that was forked before the call had ended. To be called without the GIL.
  pybind11::object wait();

 private:
  // The agent may end before the future is waited for.
  const std::weak_ptr<agent::UcxAgent> agent_;
  const agent::AnswerWait::Call call_;
  const base::HomeProcess home_;
};

// The pointer by which pybind11 holds a CallFuture. pybind11 takes the pointer
// from shared_from_this(), which returns a pointer to the base class. pybind11
// could cast that to CallFuture only if the classes had virtual functions.
template <typename T>
class FutureHolder : public std::shared_ptr<T> {
 public:
  using element_type = torch::jit::PythonFutureWrapper;
  using std::shared_ptr<T>::shared_ptr;
  explicit FutureHolder(std::shared_ptr<element_type> base)
      : std::shared_ptr<T>(std::static_pointer_cast<T>(std::move(base))) {}
};

using CallFuturePtr = FutureHolder<CallFuture>;

inline CallFuturePtr makeCallFuture(
    const std::shared_ptr<torch::distributed::rpc::RpcAgent>& agent,
    c10::intrusive_ptr<torch::distributed::rpc::JitFuture> future,
    std::optional<CallFuture::UnwrapFunc> unwrap = std::nullopt) {
  return CallFuturePtr(
      std::make_shared<CallFuture>(
          agent, std::move(future), std::move(unwrap)));
}

void bindCallFuture(pybind11::module_& module);

} // namespace torch_rpc_ext::bindings

PYBIND11_DECLARE_HOLDER_TYPE(T, torch_rpc_ext::bindings::FutureHolder<T>)
