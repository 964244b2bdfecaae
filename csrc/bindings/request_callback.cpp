#include "bindings/request_callback.h"

#include "agent/rpc_error.h"
#include "agent/ucx_agent.h"
#include "compat/script_calls.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/rpc/profiler/server_process_global_profiler.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

namespace torch_rpc_ext::bindings {

namespace rpc = torch::distributed::rpc;

namespace {

using FuturePtr = c10::intrusive_ptr<rpc::JitFuture>;
using Streams = std::vector<c10::Stream>;

class GuardedCallback final : public rpc::RequestCallbackImpl {
 public:
  GuardedCallback(agent::AllowList allowed, std::string worker)
      : allowed_(std::move(allowed)), worker_(std::move(worker)) {}

  // Upstream's profiling of the GIL leaves out a request's first wait for it,
  // which is most of them all.
  std::unique_ptr<rpc::RpcCommandBase> deserializePythonRpcCommand(
      std::unique_ptr<rpc::RpcCommandBase> command,
      const rpc::MessageType& type) const override {
    if (type == rpc::MessageType::PYTHON_CALL ||
        type == rpc::MessageType::PYTHON_REMOTE_CALL) {
      waitForGil();
    }
    return RequestCallbackImpl::deserializePythonRpcCommand(
        std::move(command), type);
  }

  // Upstream's way, less what a call without RRefs needs none of: two futures,
  // and the operator's schema parsed.
  FuturePtr processMessage(rpc::Message& request, Streams streams)
      const override {
    if (request.type() == rpc::MessageType::SCRIPT_CALL && streams.empty() &&
        rpc::profiler::processglobal::StateStackEntry::current() == nullptr) {
      try {
        if (const auto call = scriptCalls_.read(request)) {
          return processRpcWithErrors(*call, request.type(), streams);
        }
      } catch (const std::exception& error) {
        return asFuture(handleError(error, request.type(), request.id()));
      }
    }
    return RequestCallbackImpl::processMessage(request, std::move(streams));
  }

  FuturePtr processScriptCall(
      rpc::RpcCommandBase& command,
      const Streams& streams) const override {
    const auto& call = static_cast<rpc::ScriptCall&>(command);
    return allowed_.allows(call)
        ? RequestCallbackImpl::processScriptCall(command, streams)
        : refusal(call);
  }

  FuturePtr processScriptRemoteCall(
      rpc::RpcCommandBase& command,
      const Streams& streams) const override {
    const auto& call = static_cast<rpc::ScriptRemoteCall&>(command);
    // The error becomes the RRef's value, as one that a function raises:
    // upstream's user of an RRef whose creation fails says "timed out".
    return allowed_.allows(call)
        ? RequestCallbackImpl::processScriptRemoteCall(command, streams)
        : assignOwnerRRef(call.retRRefId(), call.retForkId(), refusal(call));
  }

 private:
  // While the GIL is profiled: waits until it is free, and counts that. It is
  // given back, because upstream wants to come without it.
  static void waitForGil() {
    const auto ours = std::dynamic_pointer_cast<agent::UcxAgent>(
        rpc::RpcAgent::getCurrentRpcAgent());
    if (ours == nullptr || !ours->isGILProfilingEnabled()) {
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    const pybind11::gil_scoped_acquire gil;
    ours->addGilWaitTime(
        std::chrono::duration_cast<std::chrono::microseconds>(
            std::chrono::steady_clock::now() - begin));
  }

  FuturePtr refusal(const rpc::ScriptCall& call) const {
    auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    const std::string name = agent::nameOf(call);
    future->setError(
        std::make_exception_ptr(
            agent::RpcError(
                base::ErrorKind::kRefused,
                worker_,
                "worker \"" + worker_ + "\" refused " + name + ": it " +
                    agent::kNotAllowed +
                    " (an option of UcxRpcBackendOptions)")));
    return future;
  }

  mutable compat::ScriptCallReader scriptCalls_;
  const agent::AllowList allowed_;
  const std::string worker_;
};

} // namespace

std::unique_ptr<rpc::RequestCallback> makeRequestCallback(
    agent::AllowList allowed,
    std::string worker) {
  return std::make_unique<GuardedCallback>(
      std::move(allowed), std::move(worker));
}

} // namespace torch_rpc_ext::bindings
