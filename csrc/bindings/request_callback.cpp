#include "bindings/request_callback.h"

#include "agent/creations.h"
#include "agent/device/streams.h"
#include "agent/rpc_error.h"
#include "agent/served_call.h"
#include "agent/ucx_agent.h"
#include "compat/script_calls.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_profiling_req.h>
#include <torch/csrc/distributed/rpc/profiler/server_process_global_profiler.h>
#include <torch/csrc/distributed/rpc/python_rpc_handler.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>
#include <torch/csrc/distributed/rpc/unpickled_python_remote_call.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

namespace torch_rpc_ext::bindings {

namespace rpc = torch::distributed::rpc;

namespace {

using FuturePtr = c10::intrusive_ptr<rpc::JitFuture>;
using Streams = std::vector<c10::Stream>;

// The RRef that a request makes; null for none. If autograd or a profiler has
// wrapped the request, the RRef that the wrapped request makes.
const rpc::RRefId* madeRRef(rpc::RpcCommandBase& request, int type) {
  using namespace torch::distributed::autograd;
  const auto inside = [](auto& wrapper) {
    return madeRRef(wrapper.wrappedRpc(), wrapper.wrappedMessageType());
  };
  switch (type) {
    case rpc::MessageType::PYTHON_REMOTE_CALL:
      return &static_cast<rpc::UnpickledPythonRemoteCall&>(request).rrefId();
    case rpc::MessageType::SCRIPT_REMOTE_CALL:
      return &static_cast<rpc::ScriptRemoteCall&>(request).retRRefId();
    case rpc::MessageType::FORWARD_AUTOGRAD_REQ:
      return inside(static_cast<RpcWithAutograd&>(request));
    case rpc::MessageType::RUN_WITH_PROFILING_REQ:
      return inside(static_cast<RpcWithProfilingReq&>(request));
    default:
      return nullptr;
  }
}

class GuardedCallback final : public rpc::RequestCallbackImpl {
 public:
  GuardedCallback(agent::AllowList allowed, std::string worker)
      : allowed_(std::move(allowed)), worker_(std::move(worker)) {}

  // Also measures a request's first wait for the GIL, usually the longest,
  // which upstream's profiling of the GIL leaves out.
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

  // As upstream's, but faster: a call without RRefs does not make the two
  // futures that wait for RRefs, and the schema of a builtin operator is not
  // parsed again (compat::ScriptCallReader). And a function that begins on
  // another thread finds its ServedCall there.
  FuturePtr processMessage(rpc::Message& request, Streams streams)
      const override {
    try {
      const bool isScript = request.type() == rpc::MessageType::SCRIPT_CALL ||
          request.type() == rpc::MessageType::SCRIPT_REMOTE_CALL;
      const auto call = isScript ? scriptCalls_.read(request) : nullptr;
      if (call != nullptr) {
        hasRead(*call, request.type());
        return process(*call, request.type(), streams);
      }
      if (isScript || mayRunPython(request.type())) {
        return processWhenConfirmed(request, std::move(streams));
      }
    } catch (const std::exception& error) {
      return asFuture(handleError(error, request.type(), request.id()));
    }
    return RequestCallbackImpl::processMessage(request, std::move(streams));
  }

  FuturePtr processScriptCall(
      rpc::RpcCommandBase& command,
      const Streams& streams) const override {
    const auto& call = static_cast<rpc::ScriptCall&>(command);
    if (auto refused = refusal(call)) {
      return refused;
    }
    return isOnlyRead()
        ? notBegun(at::AnyClassType::get())
        : RequestCallbackImpl::processScriptCall(command, streams);
  }

  FuturePtr processPythonCall(
      rpc::RpcCommandBase& command,
      const Streams& streams) const override {
    return isOnlyRead()
        ? notBegun(at::AnyClassType::get())
        : RequestCallbackImpl::processPythonCall(command, streams);
  }

  FuturePtr processScriptRemoteCall(
      rpc::RpcCommandBase& command,
      const Streams& streams) const override {
    const auto& call = static_cast<rpc::ScriptRemoteCall&>(command);
    const EndsCreation creation;
    // The refusal becomes the RRef's value, as an error does that a function
    // raises. If the creation itself failed, upstream would tell the RRef's
    // user "timed out" instead.
    if (auto refused = refusal(call)) {
      return assignOwnerRRef(
          call.retRRefId(), call.retForkId(), std::move(refused));
    }
    // A TorchScript function's future has no devices, so upstream orders the
    // RRef's users after this thread's current streams.
    const agent::device::StreamScope scope(streams);
    // A worker that calls itself has already made the RRef, with the function's
    // type, which the future of notBegun() does not have.
    const bool isOwn = call.retRRefId() == call.retForkId();
    return isGivenUp() && !isOwn
        ? assignOwnerRRef(
              call.retRRefId(),
              call.retForkId(),
              notBegun(at::AnyClassType::get()))
        : RequestCallbackImpl::processScriptRemoteCall(command, streams);
  }

  FuturePtr processPythonRemoteCall(
      rpc::RpcCommandBase& command,
      const Streams& streams) const override {
    const auto& call = static_cast<rpc::UnpickledPythonRemoteCall&>(command);
    const EndsCreation creation;
    return isGivenUp()
        ? assignOwnerRRef(
              call.rrefId(), call.forkId(), notBegun(c10::PyObjectType::get()))
        : RequestCallbackImpl::processPythonRemoteCall(command, streams);
  }

 private:
  // While this lives, the request that this thread serves makes an RRef.
  // Upstream has entered the RRef into its tables when it returns, even if an
  // asynchronous function still computes the value.
  class EndsCreation {
   public:
    EndsCreation() = default;
    ~EndsCreation() {
      if (auto* const creation = currentCreation()) {
        creation->ended();
      }
    }
    EndsCreation(const EndsCreation&) = delete;
    EndsCreation& operator=(const EndsCreation&) = delete;
  };

  // Of the request that this thread serves; null for none.
  static agent::Creations::Begun* currentCreation() {
    const auto* const call = agent::ServedCall::current();
    return call == nullptr ? nullptr : call->creation.get();
  }

  // The request that this thread serves has been read.
  static void hasRead(rpc::RpcCommandBase& request, rpc::MessageType type) {
    auto* const creation = currentCreation();
    const auto* const rref =
        creation == nullptr ? nullptr : madeRRef(request, type);
    if (rref != nullptr) {
      creation->makes(*rref);
    }
  }

  static bool mayRunPython(rpc::MessageType type) {
    switch (type) {
      case rpc::MessageType::PYTHON_CALL:
      case rpc::MessageType::PYTHON_REMOTE_CALL:
      case rpc::MessageType::FORWARD_AUTOGRAD_REQ:
      case rpc::MessageType::RUN_WITH_PROFILING_REQ:
        return true;
      default:
        return false;
    }
  }

  FuturePtr processWhenConfirmed(rpc::Message& request, Streams streams) const {
    auto& rrefs = rpc::RRefContext::getInstance();
    std::shared_ptr<rpc::RpcCommandBase> command;
    rrefs.recordThreadLocalPendingRRefs();
    try {
      command = deserializePythonRpcCommand(
          rpc::deserializeRequest(request), request.type());
    } catch (const std::exception&) {
      rrefs.clearRecordedPendingRRefsOnError();
      throw;
    }
    const auto ready = rrefs.waitForThreadLocalPendingRRefs();
    hasRead(*command, request.type());
    if (ready->completed() && streams.empty()) {
      return process(*command, request.type(), streams);
    }
    // Owners have still to confirm RRefs among the arguments. The function runs
    // on the thread that receives the last confirmation.
    const auto* const current = agent::ServedCall::current();
    auto held = std::make_shared<agent::WaitingBytes::Held>();
    const auto ours = ready->completed() ? nullptr : ucxAgent();
    if (current != nullptr && ours != nullptr) {
      // Others than the caller may wait for an RRef that the request makes.
      const bool mayRefuse = !current->isOnlyRead &&
          (request.type() == rpc::MessageType::PYTHON_CALL ||
           request.type() == rpc::MessageType::SCRIPT_CALL);
      auto counted = ours->parts().server().hold(current->bytes, mayRefuse);
      if (!counted.ok()) {
        return failed(counted.error());
      }
      *held = std::move(counted.value());
    }
    return ready->thenAsync(
        [this,
         command = std::move(command),
         type = request.type(),
         streams = std::move(streams),
         held = std::move(held),
         call = current == nullptr ? agent::ServedCall()
                                   : *current](rpc::JitFuture& /*ready*/) {
          held->release();
          const agent::ServedCall::Scope scope(call);
          if (type == rpc::MessageType::PYTHON_CALL && isGivenUp()) {
            return notBegun(at::AnyClassType::get());
          }
          return process(*command, type, streams);
        },
        c10::getCustomClassType<c10::intrusive_ptr<rpc::Message>>());
  }

  // As in upstream's processMessage(): if torch profiles the requests of this
  // process, the profiler gets what this thread does.
  FuturePtr process(
      rpc::RpcCommandBase& command,
      rpc::MessageType type,
      const Streams& streams) const {
    namespace profiler = rpc::profiler::processglobal;
    const auto profile = profiler::StateStackEntry::current();
    if (profile != nullptr) {
      torch::autograd::profiler::enableProfilerLegacy(
          profile->statePtr()->config());
    }
    auto answer = processRpcWithErrors(command, type, streams);
    if (profile != nullptr) {
      profiler::pushResultRecursive(
          profile, torch::autograd::profiler::disableProfilerLegacy());
    }
    return answer;
  }

  // The agent of this process; null if it is not ours.
  static std::shared_ptr<agent::UcxAgent> ucxAgent() {
    return std::dynamic_pointer_cast<agent::UcxAgent>(
        rpc::RpcAgent::getCurrentRpcAgent());
  }

  // While the GIL is profiled: takes the GIL, counts how long that took, and
  // releases it, because the caller must not hold it.
  static void waitForGil() {
    const auto ours = ucxAgent();
    if (ours == nullptr || !ours->isGILProfilingEnabled()) {
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    const pybind11::gil_scoped_acquire gil;
    ours->addGilWaitTime(
        std::chrono::duration_cast<std::chrono::microseconds>(
            std::chrono::steady_clock::now() - begin));
  }

  // Whether the caller has given up the call that this thread serves.
  static bool isGivenUp() {
    const auto* const call = agent::ServedCall::current();
    return call != nullptr && call->cancelled();
  }

  // Whether the caller had given up the call before a thread took it. Stays
  // false if the caller gives up while the arguments are read.
  static bool isOnlyRead() {
    const auto* const call = agent::ServedCall::current();
    return call != nullptr && call->isOnlyRead;
  }

  FuturePtr notBegun(c10::TypePtr type) const {
    auto future = c10::make_intrusive<rpc::JitFuture>(std::move(type));
    future->setError(
        std::make_exception_ptr(
            agent::RpcError(
                base::ErrorKind::kTimedOut,
                worker_,
                "worker \"" + worker_ +
                    "\" did not begin the call: its caller had given up")));
    return future;
  }

  // Null if this worker may and can run what the call names.
  FuturePtr refusal(const rpc::ScriptCall& call) const {
    if (!allowed_.allows(call)) {
      return failed(
          "refused " + agent::nameOf(call) + ": it " + agent::kNotAllowed +
          " (an option of UcxRpcBackendOptions)");
    }
    if (call.hasOp()) {
      return nullptr;
    }
    const auto& name = call.qualifiedName();
    const auto defined = rpc::PythonRpcHandler::getInstance()
                             .jitCompilationUnit()
                             ->find_function(name);
    // Upstream's error begins alike, but has no remedy.
    return defined != nullptr
        ? nullptr
        : failed(
              "attempted to get undefined function " + name.name() +
              ": it has no TorchScript function of this name. Import the "
              "module that defines the function, " +
              agent::moduleOf(call) + ", there before the call");
  }

  FuturePtr failed(const std::string& why) const {
    return failed(
        {base::ErrorKind::kRefused, "worker \"" + worker_ + "\" " + why});
  }

  FuturePtr failed(const base::Error& error) const {
    auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    future->setError(
        std::make_exception_ptr(
            agent::Refusal(error.kind, worker_, error.message)));
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
