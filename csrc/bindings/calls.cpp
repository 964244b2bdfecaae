// The calls of rpc_sync() and rpc_async(). Replaces upstream's
// _invoke_rpc_builtin, _invoke_rpc_torchscript and _invoke_rpc_python_udf, for
// speed:
//
// - For a TorchScript function upstream parses the function's name and copies
//   its schema at each call. Here Python passes the function itself.
//
// - For the other calls, the future keeps a result that is one tensor as a C++
//   tensor. Upstream makes the Python object in the thread that completes the
//   future, which takes the GIL for that, and once more to free the message. In
//   a burst of calls this thread and the sending thread would pass the GIL to
//   and fro at each answer. Here the waiting thread makes the object, since
//   that thread takes the GIL anyway.

#include "agent/one_copy.h"
#include "bindings/bindings.h"
#include "bindings/call_future.h"
#include "bindings/remote_exception.h"
#include "bindings/rrefs.h"
#include "compat/script_calls.h"

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/profiler.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/record_function_ops.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/utils.h>
#include <torch/csrc/distributed/rpc/profiler/remote_profiler_manager.h>
#include <torch/csrc/distributed/rpc/python_call.h>
#include <torch/csrc/distributed/rpc/python_resp.h>
#include <torch/csrc/distributed/rpc/python_rpc_handler.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace jit = torch::jit;
namespace rpc = torch::distributed::rpc;

namespace {

// Source: torch_rpc_ext/_upstream/payloads.py
constexpr std::string_view kTensor = "\x01Tensor";
constexpr std::string_view kNone = "\x01None";

struct Match {
  std::shared_ptr<jit::Operator> op; // null if none matches
  jit::Stack stack;
};

bool isNumber(py::handle value) {
  PyObject* const object = value.ptr();
  return PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
      PyBool_Check(object) || PyComplex_CheckExact(object);
}

// False only if createStackForSchema() would throw. Asked first because an
// exception takes 50 us, half of a call; torch.add(tensor, 1) would meet one,
// from the overload that takes two tensors.
bool mayTake(
    const c10::FunctionSchema& schema,
    const py::args& args,
    const py::kwargs& kwargs) {
  const auto& wanted = schema.arguments();
  if (args.size() + kwargs.size() > wanted.size()) {
    return false;
  }
  for (size_t i = 0; i < args.size(); ++i) {
    if (wanted[i].kwarg_only() ||
        (wanted[i].type()->kind() == c10::TypeKind::TensorType &&
         isNumber(args[i]))) {
      return false;
    }
  }
  return true;
}

// Finds the first overload that takes the arguments. Only operators of torch's
// dispatcher, which upstream also tries first.
Match match(
    const std::string& name,
    const std::optional<std::string>& overload,
    const py::args& args,
    const py::kwargs& kwargs) {
  for (auto& op : jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (!op->isC10Op() ||
        (overload && *overload != op->schema().overload_name()) ||
        !mayTake(op->schema(), args, kwargs)) {
      continue;
    }
    try {
      jit::Stack stack =
          jit::createStackForSchema(op->schema(), args, kwargs, std::nullopt);
      return {std::move(op), std::move(stack)};
    } catch (const jit::schema_match_error&) {
      // The next overload may take the arguments.
    } catch (const std::runtime_error&) {
      break;
    }
  }
  return {};
}

bool returnsOneTensor(const jit::Operator& op) {
  const auto& returns = op.schema().returns();
  return returns.size() == 1 &&
      returns[0].type()->kind() == c10::TypeKind::TensorType;
}

// Makes the value of a call's future from the answer.
using ResultOf = c10::IValue (*)(const rpc::Message&);

void settle(rpc::JitFuture& result, rpc::JitFuture& answer, ResultOf resultOf) {
  if (answer.hasError()) {
    result.setError(answer.exception_ptr());
    return;
  }
  c10::IValue value;
  try {
    value = resultOf(*answer.value().toCustomClass<rpc::Message>());
  } catch (py::error_already_set& error) {
    // Reading an answer runs Python, so the unpickler, or a signal handler, may
    // raise. The future keeps the exception; upstream would keep its text only.
    result.setError(pythonException(error));
    return;
  } catch (const std::exception&) {
    result.setError(std::current_exception());
    return;
  }
  result.markCompleted(std::move(value), answer.storages());
}

c10::intrusive_ptr<rpc::JitFuture> futureOf(
    const c10::intrusive_ptr<rpc::JitFuture>& answer,
    c10::TypePtr type,
    ResultOf resultOf) {
  auto result = answer->createInstance(std::move(type));
  if (answer->completed() && answer->devices().empty()) {
    // In rpc_sync() this thread has waited for the answer. No callback, because
    // that would set the caller's thread-local state, which this thread has
    // already, and restore it, which takes 0.7 us. With devices a callback is
    // needed, because it also makes the streams wait.
    settle(*result, *answer, resultOf);
  } else {
    answer->addCallback(
        at::wrapPropagateTLSState([result, resultOf](rpc::JitFuture& answer) {
          settle(*result, answer, resultOf);
        }));
  }
  return result;
}

std::unique_ptr<rpc::RpcCommandBase> responseOf(
    const rpc::Message& message,
    rpc::MessageType wanted) {
  auto type = message.type();
  auto response = rpc::deserializeResponse(message, type);
  TORCH_CHECK(
      type == wanted,
      "a call was answered by a message of type ",
      static_cast<int>(type),
      " and not ",
      static_cast<int>(wanted));
  return response;
}

// ---- builtin operators and TorchScript functions ---------------------------

c10::IValue resultOfScript(const rpc::Message& message) {
  const auto response = responseOf(message, rpc::MessageType::SCRIPT_RET);
  return static_cast<rpc::ScriptResp&>(*response).value();
}

// Null if upstream's own function has to make the call, or refuse it.
CallFuturePtr invokeBuiltin(
    const rpc::WorkerInfo& to,
    const std::string& name,
    float timeoutSeconds,
    const py::args& args,
    const py::kwargs& kwargs) {
  if (!name.starts_with("aten::")) {
    return nullptr;
  }
  auto [op, stack] = match(name, std::nullopt, args, kwargs);
  if (op == nullptr || !returnsOneTensor(*op)) {
    return nullptr;
  }
  const py::gil_scoped_release release;
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  const auto answer = torch::distributed::autograd::sendMessageWithAutograd(
      *agent,
      to,
      rpc::ScriptCall(op, std::move(stack)).toMessage(),
      /*forceGradRecording=*/false,
      timeoutSeconds);
  return makeCallFuture(
      agent, futureOf(answer, c10::TensorType::get(), &resultOfScript));
}

// A call of an operator that the user names, `torch.ops.name.op`, in any
// namespace. Neither distributed autograd nor torch's profilers hear of the
// call, because upstream cannot read such a call inside of their messages. Nor
// can the call have tensors of devices, because upstream reads the messages
// with such tensors (GuardedCallback::processMessage()).
CallFuturePtr invokeOperator(
    const rpc::WorkerInfo& to,
    const std::string& name,
    const std::optional<std::string>& overload,
    const py::tuple& args,
    const py::dict& kwargs,
    float timeoutSeconds) {
  requireScriptArguments(args, kwargs);
  auto [op, stack] =
      match(name, overload, args.cast<py::args>(), kwargs.cast<py::kwargs>());
  if (op == nullptr) {
    throw py::type_error("no operator " + name + " takes these arguments");
  }
  if (op->schema().returns().size() != 1) {
    throw py::type_error(
        "a remote operator returns one value: " + toString(op->schema()));
  }
  const py::gil_scoped_release release;
  const auto type = op->schema().returns()[0].type();
  auto message =
      compat::OperatorCall(std::move(op), std::move(stack)).toMessage();
  using torch::distributed::autograd::DistAutogradContainer;
  const bool records = DistAutogradContainer::getInstance().hasValidContext();
  for (const auto& tensor : message->tensors()) {
    TORCH_CHECK(
        tensor.is_cpu() && !(records && tensor.requires_grad()),
        "a remote operator takes tensors of the CPU, and within a context of "
        "distributed autograd none that requires a gradient: call a function "
        "that calls ",
        name);
  }
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  const auto answer = agent->send(to, std::move(message), timeoutSeconds);
  return makeCallFuture(agent, futureOf(answer, type, &resultOfScript));
}

// Tells torch's profilers of a call of a TorchScript function, under upstream's
// name for such calls. Under the legacy profiler, the code that has set the
// current key has already told of the call. Upstream's own function also sets a
// key for the other profilers and never resets it, so that they see only the
// first such call of each thread; this class sets none.
class ProfiledCall {
 public:
  ProfiledCall(
      const rpc::RpcAgent& agent,
      const std::string& function,
      const std::string& to) {
    if (torch::autograd::profiler::profilerEnabled() &&
        !rpc::RemoteProfilerManager::getInstance().isCurrentKeySet()) {
      record_ = torch::autograd::profiler::record_function_enter_new(
          "rpc_async_jit#" + function + "(" + agent.getWorkerInfo().name_ +
          " -> " + to + ")");
    }
  }

  // A future that completes once the profiler knows of the call's end.
  c10::intrusive_ptr<rpc::JitFuture> until(
      c10::intrusive_ptr<rpc::JitFuture> done) const {
    return record_ == nullptr
        ? done
        : torch::autograd::profiler::_call_end_callbacks_on_fut_new(
              record_, done);
  }

 private:
  c10::intrusive_ptr<torch::autograd::profiler::PythonRecordFunction> record_;
};

// Null if upstream's own function has to refuse the call.
CallFuturePtr invokeScript(
    const std::string& to,
    const jit::StrongFunctionPtr& function,
    const py::tuple& args,
    const py::dict& kwargs,
    float timeoutSeconds,
    bool isAsync) {
  const auto& schema = function.function_->getSchema();
  // The function must be in the compilation unit of torch.jit.script(), because
  // the callee looks up the name in its own such unit.
  if (function.cu_ !=
          rpc::PythonRpcHandler::getInstance().jitCompilationUnit() ||
      schema.returns().size() != 1) {
    return nullptr;
  }
  jit::Stack stack;
  {
    const py::gil_scoped_acquire acquire;
    requireScriptArguments(args, kwargs);
    stack = jit::createStackForSchema(
        schema, args.cast<py::args>(), kwargs.cast<py::kwargs>(), std::nullopt);
  }
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  const ProfiledCall profiled(
      *agent, function.function_->qualname().qualifiedName(), to);
  const auto answer = torch::distributed::autograd::sendMessageWithAutograd(
      *agent,
      agent->getWorkerInfo(to),
      rpc::ScriptCall(function.function_->qualname(), std::move(stack), isAsync)
          .toMessage(),
      /*forceGradRecording=*/true,
      timeoutSeconds);
  return makeCallFuture(
      agent,
      profiled.until(
          futureOf(answer, schema.returns()[0].type(), &resultOfScript)));
}

// ---- functions of Python ---------------------------------------------------

c10::IValue resultOfFunction(const rpc::Message& message) {
  const auto response = responseOf(message, rpc::MessageType::PYTHON_RET);
  const auto& pickled =
      static_cast<rpc::PythonResp&>(*response).serializedPyObj();
  if (pickled.payload_ == kTensor && pickled.tensors_.size() == 1) {
    return pickled.tensors_[0];
  }
  if (pickled.payload_ == kNone) {
    return {};
  }
  auto& handler = rpc::PythonRpcHandler::getInstance(); // without the GIL
  const py::gil_scoped_acquire acquire;
  return jit::toIValue(handler.deserialize(pickled), c10::PyObjectType::get());
}

CallFuturePtr invokeFunction(
    const rpc::WorkerInfo& to,
    std::string& pickled,
    std::vector<at::Tensor>& tensors,
    float timeoutSeconds,
    bool isAsync) {
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  const auto answer = torch::distributed::autograd::sendMessageWithAutograd(
      *agent,
      to,
      rpc::PythonCall(
          rpc::SerializedPyObj(std::move(pickled), std::move(tensors)), isAsync)
          .toMessage(),
      /*forceGradRecording=*/true,
      timeoutSeconds);
  return makeCallFuture(
      agent,
      futureOf(answer, c10::AnyType::get(), &resultOfFunction),
      [](const py::object& value) {
        if (value.is_none() || THPVariable_CheckExact(value.ptr())) {
          return; // no exception
        }
        // Raises a remote exception in the thread that waits for the future.
        const py::gil_scoped_release release;
        rpc::PythonRpcHandler::getInstance().handleException(value);
      });
}

// Makes `next` the calling thread's OneCopy. Returns the OneCopy before as a
// number, which Python can keep; 0 for none.
uintptr_t setOneCopy(agent::OneCopy* next) {
  return reinterpret_cast<uintptr_t>(agent::OneCopy::setCurrent(next));
}

std::unique_ptr<agent::OneCopy> makeOneCopy(
    const std::optional<std::vector<at::Tensor>>& only) {
  if (!only) {
    return std::make_unique<agent::OneCopy>();
  }
  std::vector<const void*> addresses;
  for (const at::Tensor& tensor : *only) {
    addresses.push_back(tensor.storage().data());
  }
  return std::make_unique<agent::OneCopy>(std::move(addresses));
}

} // namespace

void bindCalls(py::module_& module) {
  py::class_<agent::OneCopy>(
      module, "OneCopy", "Calls that share the copies of their tensors.")
      .def(py::init(&makeOneCopy), py::arg("only"))
      .def(
          "enter",
          [](agent::OneCopy& self) { return setOneCopy(&self); },
          "Begin on this thread; returns what leave() gets.")
      .def("leave", [](agent::OneCopy&, uintptr_t before) {
        setOneCopy(reinterpret_cast<agent::OneCopy*>(before));
      });
  // The parameters have no names here: a name could clash with a keyword
  // argument of the operator.
  module.def("invoke_builtin", &invokeBuiltin);
  module.def("invoke_operator", &invokeOperator);
  module.def(
      "invoke_script", &invokeScript, py::call_guard<py::gil_scoped_release>());
  module.def(
      "invoke_function",
      &invokeFunction,
      py::call_guard<py::gil_scoped_release>());
}

} // namespace torch_rpc_ext::bindings
