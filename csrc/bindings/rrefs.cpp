// What Python code needs for RRefs: it learns that a creation has failed, it
// checks RRefs, and values of RRefs, that would crash the process in torch's
// code, and it releases RRefs in messages that nobody reads.

#include "bindings/rrefs.h"
#include "agent/creation_failure.h"
#include "agent/rpc_error.h"
#include "agent/ucx_agent.h"
#include "bindings/bindings.h"
#include "compat/torch_compat.h"

#include <torch/csrc/distributed/rpc/py_rref.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <string>
#include <utility>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace rpc = torch::distributed::rpc;
using agent::UcxAgent;

namespace {

// Python's own limit for recursion. At this depth torch's recursion fits on the
// stack of every thread.
constexpr int kMaxDepth = 1000;

c10::intrusive_ptr<rpc::RRef> rrefOf(const rpc::PyRRef& python) {
  return c10::static_intrusive_pointer_cast<rpc::RRef>(
      python.toIValue().toRRef());
}

// Whether remote() raises the error. Time-outs, and faults that tests inject,
// are raised where the RRef is used, as by upstream.
bool isRaised(const rpc::JitFuture& future) {
  try {
    std::rethrow_exception(future.exception_ptr());
  } catch (const agent::RpcError& error) {
    return error.kind() != base::ErrorKind::kTimedOut &&
        rpc::getRPCErrorType(future) != rpc::RPCErrorType::INTENTIONAL_FAILURE;
  } catch (...) {
    return false;
  }
}

// Sees to it that the RRef is marked as failed if its creation fails later. If
// the creation has failed already, marks the RRef now and raises the error.
void watchCreation(const rpc::PyRRef& python) {
  const auto rref = rrefOf(python);
  const auto future = rref->getOwnerCreationFuture();
  py::gil_scoped_release release;
  if (!future->completed()) {
    // The RRef must be marked before the future gets the error: a thread that
    // sees the error may use the RRef at once.
    const auto ours = std::dynamic_pointer_cast<UcxAgent>(
        rpc::RpcAgent::getCurrentRpcAgent());
    if (ours == nullptr ||
        ours->parts().caller().beforeFailure(
            *future, [rref](const std::exception_ptr& why) {
              compat::failedToCreate(*rref, why);
            })) {
      return;
    }
    future->wait(); // the call is just ending on another thread
  }
  if (future->hasError()) {
    compat::failedToCreate(*rref, future->exception_ptr());
    if (isRaised(*future)) {
      std::rethrow_exception(future->exception_ptr());
    }
  }
}

// If the RRef's creation failed, raises the error: torch says "timed out" for
// each cause. Time-outs are left to torch.
void raiseIfNotCreated(const rpc::PyRRef& python) {
  // Null unless remote() made the RRef.
  const auto future = rrefOf(python)->getOwnerCreationFuture();
  if (future != nullptr && future->completed() && future->hasError() &&
      isRaised(*future)) {
    std::rethrow_exception(future->exception_ptr());
  }
}

// Called before an RRef is passed to another worker. Raises if the RRef could
// not be created, or if its owner has died since the RRef was made. If torch
// cannot write the RRef's type into a message, changes the type to that of a
// Python object, and raises where that is not possible.
void beforePassing(UcxAgent& agent, const rpc::PyRRef& python) {
  raiseIfNotCreated(python);
  const auto rref = rrefOf(python);
  const base::Error error =
      agent.parts().group().ownerDied(rref->rrefId(), rref->owner());
  if (error) {
    throw agent::RpcError(error.kind, rref->ownerName(), error.message);
  }
  if (!compat::canBeNamed(*rref->type()) && !compat::becomePython(*rref)) {
    throw py::type_error(
        "an RRef to a " + rref->type()->annotation_str() +
        ", which remote() made from a TorchScript function, cannot be passed "
        "on: torch cannot name the type of a tuple or an enum to another "
        "worker; let the function return a list, or call it from a Python "
        "function");
  }
}

void send(rpc::worker_id_t to, c10::intrusive_ptr<rpc::Message> message) {
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  agent->send(agent->getWorkerInfo(to), std::move(message));
}

// Releases a fork that this worker has passed in a message which no worker
// reads, or whose reader has died.
void giveUpFork(const rpc::RRefForkData& passed) {
  auto& context = rpc::RRefContext::getInstance();
  if (passed.ownerId_ == context.getWorkerId()) {
    // Throws for a fork that is released already. The result is the RRef if
    // nobody holds it any more; its value may be a Python object.
    const auto last = context.delForkOfOwner(passed.rrefId_, passed.forkId_);
    return;
  }
  const py::gil_scoped_release release;
  context.delPendingChild(passed.forkId_);
  // The reader may have told the owner of the fork before it died, even if it
  // has not confirmed the fork here: that comes when the function has returned.
  send(
      passed.ownerId_,
      rpc::RRefUserDelete(passed.rrefId_, passed.forkId_).toMessage());
}

// Confirms a fork in a message to this worker, and releases the fork. Does
// nothing if this worker has read the fork: then the code that has read it does
// both. The owner only confirms, because it has made no user RRef of the fork;
// if the owner has passed the fork to itself, it releases the fork.
void confirmFork(const rpc::RRefForkData& passed) {
  auto& context = rpc::RRefContext::getInstance();
  const bool isOwner = passed.ownerId_ == context.getWorkerId();
  if (isOwner && passed.parent_ == passed.ownerId_) {
    giveUpFork(passed);
    return;
  }
  const py::gil_scoped_release release;
  if (isOwner) {
    send(passed.parent_, rpc::RRefChildAccept(passed.forkId_).toMessage());
  } else if (!compat::hasRead(passed.forkId_)) {
    const auto rref = context.getOrCreateRRef(passed, c10::PyObjectType::get());
    context.notifyOwnerAndParentOfFork(passed.forkId_, passed.parent_, rref);
  }
}

// Binds a function that gets the parts of a pickled RRef.
template <void (*Act)(const rpc::RRefForkData&)>
void bindFork(py::module_& module, const char* name) {
  module.def(
      name,
      [](rpc::worker_id_t owner,
         rpc::worker_id_t createdOn,
         rpc::local_id_t rref,
         rpc::worker_id_t forkedOn,
         rpc::local_id_t fork,
         rpc::worker_id_t parent,
         const py::object& /*type*/) {
        Act({owner, {createdOn, rref}, {forkedOn, fork}, parent, ""});
      });
}

// Visits a value and, in lists, tuples and dicts, all its parts. Raises a
// TypeError if the nesting is too deep, and, where wanted, for an RRef whose
// type torch cannot write into a message.
class Walker {
 public:
  Walker(const char* what, bool refusesRRefs)
      : what_(what),
        rref_(
            refusesRRefs ? py::detail::get_type_info(typeid(rpc::PyRRef))->type
                         : nullptr) {}

  void visit(PyObject* value) {
    if (PyList_Check(value) || PyTuple_Check(value)) {
      enter();
      // Read the size again each time: another thread may change the list while
      // an element is visited.
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
        visit(PySequence_Fast_GET_ITEM(value, i));
      }
      --depth_;
    } else if (PyDict_Check(value)) {
      enter();
      PyObject* key = nullptr;
      PyObject* item = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item) != 0;) {
        visit(key);
        visit(item);
      }
      --depth_;
    } else if (rref_ != nullptr && PyObject_TypeCheck(value, rref_)) {
      refuse(*py::handle(value).cast<rpc::PyRRef*>());
    }
  }

 private:
  void enter() {
    if (++depth_ > kMaxDepth) {
      throw py::type_error(
          std::string(what_) + " contains itself, or nests deeper than " +
          std::to_string(kMaxDepth) +
          " levels: torch infers its TorchScript type level by level, without "
          "an end");
    }
  }

  void refuse(const rpc::PyRRef& python) const {
    const auto rref = rrefOf(python);
    if (!compat::canBeNamed(*rref->type())) {
      throw py::type_error(
          std::string(what_) + " holds an RRef to a " +
          rref->type()->annotation_str() +
          ": torch cannot name the type of a tuple or an enum to another "
          "worker; make the RRef from a list, or call a Python function");
    }
  }

  const char* const what_;
  PyTypeObject* const rref_; // Python's class of RRefs; null to ignore RRefs
  int depth_ = 0;
};

} // namespace

void requireScriptArguments(const py::tuple& args, const py::dict& kwargs) {
  Walker walker("an argument of a TorchScript function", /*refusesRRefs=*/true);
  walker.visit(args.ptr());
  walker.visit(kwargs.ptr());
}

void bindRRefs(py::module_& module) {
  module.def("watch_creation", &watchCreation, py::arg("rref"));
  module.def("raise_if_not_created", &raiseIfNotCreated, py::arg("rref"));
  module.def("forget_creation_failure", &agent::forgetCreationFailure);
  module.def("raise_creation_failure", [] {
    if (const auto failure = agent::creationFailure()) {
      std::rethrow_exception(failure);
    }
  });
  bindFork<giveUpFork>(module, "give_up_fork");
  bindFork<confirmFork>(module, "confirm_fork");
  module.def(
      "before_passing", &beforePassing, py::arg("agent"), py::arg("rref"));
  module.def(
      "require_script_arguments",
      &requireScriptArguments,
      py::arg("args"),
      py::arg("kwargs"));
  module.def(
      "require_finite",
      [](const py::object& value) {
        Walker("the value of an RRef", /*refusesRRefs=*/false)
            .visit(value.ptr());
      },
      py::arg("value"));
}

} // namespace torch_rpc_ext::bindings
