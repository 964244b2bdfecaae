#pragma once

// What depends on private members of torch, for 2.11 <= torch < 3.

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace torch_rpc_ext::compat {

// torch has two singletons that remember the first RPC agent of the process. A
// second init_rpc() fails if the rank is another one, or it sends through an
// agent that no longer exists (pytorch issue 46491). There is no public way to
// renew the singletons. This uses a rule of C++: an explicit instantiation may
// name private members.
template <auto Member, typename Tag>
struct Expose {
  friend constexpr auto privateMember(Tag) {
    return Member;
  }
};

#define TORCH_RPC_EXT_EXPOSE(Tag, Class, member) \
  struct Tag {                                   \
    friend constexpr auto privateMember(Tag);    \
  };                                             \
  template struct Expose<&Class::member, Tag>;

TORCH_RPC_EXT_EXPOSE(
    AutogradInitialized,
    torch::distributed::autograd::DistAutogradContainer,
    initialized_)
TORCH_RPC_EXT_EXPOSE(
    AutogradContexts,
    torch::distributed::autograd::DistAutogradContainer,
    autograd_contexts_)
TORCH_RPC_EXT_EXPOSE(
    AutogradNextContext,
    torch::distributed::autograd::DistAutogradContainer,
    next_context_id_)
TORCH_RPC_EXT_EXPOSE(RRefAgent, torch::distributed::rpc::RRefContext, agent_)
TORCH_RPC_EXT_EXPOSE(
    RRefDestroyed,
    torch::distributed::rpc::RRefContext,
    destroyed_)
TORCH_RPC_EXT_EXPOSE(RRefMutex, torch::distributed::rpc::RRefContext, mutex_)
TORCH_RPC_EXT_EXPOSE(RRefForks, torch::distributed::rpc::RRefContext, forks_)
TORCH_RPC_EXT_EXPOSE(
    RRefPendingUsers,
    torch::distributed::rpc::RRefContext,
    pendingUsers_)
TORCH_RPC_EXT_EXPOSE(
    RRefConfirmedUsers,
    torch::distributed::rpc::RRefContext,
    confirmedUsers_)
TORCH_RPC_EXT_EXPOSE(
    RRefNextLocalId,
    torch::distributed::rpc::RRefContext,
    nextLocalId_)
TORCH_RPC_EXT_EXPOSE(RRefTimedOut, torch::distributed::rpc::RRef, timedOut_)
TORCH_RPC_EXT_EXPOSE(RRefType, torch::distributed::rpc::RRef, type_)
TORCH_RPC_EXT_EXPOSE(
    ThreadObjects,
    at::impl::ThreadLocalPythonObjects,
    obj_dict_)

TORCH_RPC_EXT_EXPOSE(FutureMutex, c10::ivalue::Future, mutex_)
TORCH_RPC_EXT_EXPOSE(FutureCallbacks, c10::ivalue::Future, callbacks_)

#undef TORCH_RPC_EXT_EXPOSE

// Runs `callback` when the future is completed, before all other callbacks; at
// once if the future is completed already.
template <typename Callback>
void addFirstCallback(c10::ivalue::Future& future, Callback callback) {
  std::unique_lock lock(future.*privateMember(FutureMutex{}));
  if (future.completed()) {
    lock.unlock();
    callback(future);
    return;
  }
  auto& callbacks = future.*privateMember(FutureCallbacks{});
  callbacks.emplace(
      callbacks.begin(), std::move(callback), /*uses_future=*/false);
}

// Whether Python has an object for the storage.
inline bool hasPyObject(const c10::StorageImpl& storage) {
  const auto has = [](const auto* slot) {
    if constexpr (requires { slot->load_pyobj(); }) {
      return slot->load_pyobj() != nullptr;
    } else if constexpr (requires { slot->_unchecked_untagged_pyobj(); }) {
      return slot->_unchecked_untagged_pyobj() != nullptr;
    } else {
      return true;
    }
  };
  return has(storage.pyobj_slot());
}

// How many callbacks a future will run when it is completed.
inline size_t callbacks(c10::ivalue::Future& future) {
  const std::lock_guard lock(future.*privateMember(FutureMutex{}));
  return (future.*privateMember(FutureCallbacks{})).size();
}

// Whether Python has given this thread objects by torch._C._stash_obj_in_tls().
inline bool hasThreadLocalPythonObjects() {
  const auto& objects = at::impl::ThreadLocalPythonObjects::get_state();
  return !(objects.*privateMember(ThreadObjects{})).empty();
}

// Lets dist_autograd take a new worker id. To be called before init_rpc(),
// while no agent runs.
inline void forgetAutogradWorker() {
  using torch::distributed::autograd::DistAutogradContainer;
  try {
    auto& container = DistAutogradContainer::getInstance();
    container.*privateMember(AutogradInitialized{}) = false;
  } catch (const std::exception&) {
    // The container was never initialised: this is the first init_rpc().
  }
}

// A worker that comes back after its death begins a new life (agent/hello.h).
// The ids that torch makes carry lives, so that ids of different lives differ.
//
// The id of an autograd context is the worker's id in the upper 16 bits, and a
// counter that begins at 0 in each process. The upper 16 bits of the counter
// are the worker's life.
constexpr int kContextWorkerShift = 48;
constexpr int kContextLifeShift = 32;
// The id of an RRef or fork is the worker's id, and beside it a counter of 64
// bits. The counter's upper bits are the greatest life of any worker that the
// id's maker knew of.
constexpr int kRRefLifeShift = 40;

constexpr int64_t lifeInContextId(uint32_t life) {
  return static_cast<int64_t>(life & 0xffff) << kContextLifeShift;
}

// Makes the ids of new autograd contexts carry `life`. To be called before the
// first context of a group.
inline void beginContextIds(uint32_t life) {
  using torch::distributed::autograd::DistAutogradContainer;
  constexpr int64_t kLife = lifeInContextId(0xffff);
  try {
    auto& next = DistAutogradContainer::getInstance().*
        privateMember(AutogradNextContext{});
    next = (next.load() & ~kLife) | lifeInContextId(life);
  } catch (const std::exception&) {
    // init_rpc() has not initialised the container, so there will be no
    // contexts.
  }
}

// Releases the distributed autograd contexts that a worker began, except those
// of its life `except`, in this process and at the workers to which this
// process passed them. Returns their number in this process. Reads a private
// member, because torch can release a context by its id, but does not list the
// ids.
inline size_t releaseAutogradOf(
    torch::distributed::rpc::worker_id_t worker,
    std::optional<uint32_t> except) {
  using torch::distributed::autograd::DistAutogradContainer;
  constexpr int64_t kLife = lifeInContextId(0xffff);
  try {
    auto& container = DistAutogradContainer::getInstance();
    std::vector<int64_t> ids;
    for (auto& shard : container.*privateMember(AutogradContexts{})) {
      std::lock_guard lock(shard.lock);
      for (const auto& entry : shard.contexts) {
        if (entry.first >> kContextWorkerShift == worker &&
            !(except && (entry.first & kLife) == lifeInContextId(*except))) {
          ids.push_back(entry.first);
        }
      }
    }
    for (const int64_t id : ids) {
      container.releaseContextIfPresent(id);
    }
    return ids.size();
  } catch (const std::exception&) {
    // The container was never initialised, or the group is just shutting down.
    return 0;
  }
}

// The agent that RRefs use.
inline std::shared_ptr<torch::distributed::rpc::RpcAgent>& agentOf(
    torch::distributed::rpc::RRefContext& context) {
  // Upstream declares the member const, but the object is not const, so this
  // cast is legal.
  return const_cast<std::shared_ptr<torch::distributed::rpc::RpcAgent>&>(
      context.*privateMember(RRefAgent{}));
}

// Makes RRefs use `agent`. To be called for each new agent before RRefs are
// made.
inline void renewRRefContext(
    const std::shared_ptr<torch::distributed::rpc::RpcAgent>& agent) {
  auto& context = torch::distributed::rpc::RRefContext::getInstance();
  agentOf(context) = agent;
  context.*privateMember(RRefDestroyed{}) = false;
}

// The counter in the lower bits of the ids. It goes on when the life changes,
// so within a process no id comes twice.
constexpr int64_t kRRefCounter = (int64_t{1} << kRRefLifeShift) - 1;

// Makes the ids of new RRefs and forks carry no life: a new group begins, which
// counts its lives from 0.
inline void resetLifeOfRRefs() {
  *privateMember(RRefNextLocalId{}) &= kRRefCounter;
}

// Makes the ids of new RRefs and forks carry `life`, unless they carry a later
// life already: several threads learn of lives, in any order. Then no new id
// equals one that this worker made in a former life, which other workers may
// still hold; and isOlder() can tell whether an RRef was made in a former life
// of its owner.
inline void raiseLifeOfRRefs(uint32_t life) {
  const auto first = static_cast<int64_t>(life) << kRRefLifeShift;
  auto& next = *privateMember(RRefNextLocalId{});
  int64_t before = next.load();
  while (before < first &&
         !next.compare_exchange_weak(before, first | (before & kRRefCounter))) {
  }
}

inline uint32_t lifeOfRRefs() {
  return static_cast<uint32_t>(
      *privateMember(RRefNextLocalId{}) >> kRRefLifeShift);
}

// Whether the RRef's id was made before its maker knew of `life`.
inline bool isOlder(const torch::distributed::rpc::RRefId& id, uint32_t life) {
  return id.localId_ >> kRRefLifeShift < static_cast<int64_t>(life);
}

// Works around a bug of torch: RRef::handleError() keeps its handlers in a
// static table, and they hold the `this` of the first RRef that ever failed. So
// each later time-out of a creation writes to that first RRef, which is freed
// by then. This lets an RRef that lives for ever fail first. failedToCreate()
// marks the RRef that did fail. To be called before the first RRef is made.
inline void keepRRefErrorsHarmless() {
  namespace rpc = torch::distributed::rpc;
  const rpc::RRefId id(/*createdOn=*/0, /*localId=*/-1);
  static auto* const first =
      new c10::intrusive_ptr<rpc::UserRRef>(c10::make_intrusive<rpc::UserRRef>(
          /*ownerId=*/0, id, id, at::AnyClassType::get()));
  (*first)->handleError(
      rpc::RPCErrorType::TIMEOUT,
      *c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get()));
}

// Deletes the forks that a lost worker got from remote() of RRefs owned by this
// process; with `before`, only those whose ids are older than that life.
// Without this, torch would wait for ever for the worker to delete them.
// Returns the values that no other worker holds; to destroy them may need the
// GIL.
//
// Forks that were passed on to other workers stay. The number of the worker's
// own fork is the RRef's number plus 1, because remote() takes the numbers of
// the RRef and of its first fork one after the other.
inline std::vector<c10::intrusive_ptr<torch::distributed::rpc::RRef>>
releaseRRefsOf(
    torch::distributed::rpc::worker_id_t worker,
    std::optional<uint32_t> before) {
  namespace rpc = torch::distributed::rpc;
  auto& context = rpc::RRefContext::getInstance();
  std::vector<std::pair<rpc::RRefId, rpc::ForkId>> held;
  {
    std::lock_guard lock(context.*privateMember(RRefMutex{}));
    for (const auto& [id, forks] : context.*privateMember(RRefForks{})) {
      const rpc::ForkId first(id.createdOn_, id.localId_ + 1);
      if (id.createdOn_ == worker && forks.count(first) != 0 &&
          (!before || isOlder(id, *before))) {
        held.emplace_back(id, first);
      }
    }
  }
  std::vector<c10::intrusive_ptr<rpc::RRef>> values;
  for (const auto& [id, fork] : held) {
    try {
      if (auto value = context.delForkOfOwner(id, fork)) {
        values.push_back(std::move(value));
      }
    } catch (const std::exception&) {
      // The worker's own message that deletes this fork arrived meanwhile.
    }
  }
  return values;
}

// Whether this worker has read the fork from a message, and still has it.
inline bool hasRead(const torch::distributed::rpc::ForkId& fork) {
  auto& context = torch::distributed::rpc::RRefContext::getInstance();
  std::lock_guard lock(context.*privateMember(RRefMutex{}));
  return (context.*privateMember(RRefPendingUsers{})).count(fork) != 0 ||
      (context.*privateMember(RRefConfirmedUsers{})).count(fork) != 0;
}

// Whether RRef::fork() can write the type for another worker. fork() crashes
// for a tuple type without a name, which most tuple types are. The name of an
// enum type means nothing to a worker that has not compiled the enum.
inline bool canBeNamed(const c10::Type& type) {
  if (const auto* const tuple = type.castRaw<c10::TupleType>();
      tuple != nullptr && !tuple->name()) {
    return false;
  }
  const std::function<bool(const c10::Type&)> hasEnum =
      [&](const c10::Type& part) {
        const auto parts = part.containedTypes();
        return part.kind() == c10::TypeKind::EnumType ||
            std::any_of(parts.begin(), parts.end(), [&](const auto& each) {
                 return hasEnum(*each);
               });
      };
  return !hasEnum(type);
}

// Makes the RRef's type that of a Python object, which has a name. The RRef's
// value is then fetched as a pickle. Returns false unless this process owns the
// RRef and the value is here.
inline bool becomePython(torch::distributed::rpc::RRef& rref) {
  namespace rpc = torch::distributed::rpc;
  if (!rref.isOwner() || !static_cast<rpc::OwnerRRef&>(rref).hasValue()) {
    return false;
  }
  const_cast<c10::TypePtr&>(rref.*privateMember(RRefType{})) =
      c10::PyObjectType::get();
  return true;
}

// Whether no other worker has the RRef, which this worker owns. If the worker
// has made the RRef by remote(), it counts as one holder itself.
inline bool isOnlyHere(const torch::distributed::rpc::RRef& rref) {
  auto& context = torch::distributed::rpc::RRefContext::getInstance();
  std::lock_guard lock(context.*privateMember(RRefMutex{}));
  const auto& all = context.*privateMember(RRefForks{});
  const auto forks = all.find(rref.rrefId());
  return forks == all.end() || forks->second.size() <= 1;
}

// Marks the RRef as timed out, as RRef::handleError() should (see
// keepRRefErrorsHarmless()). If the RRef is of this worker, upstream is about
// to drop it, unless others have it too: then nobody would get the value any
// more, and a thread that waits for it already gets `why`.
inline void failedToCreate(
    torch::distributed::rpc::RRef& rref,
    const std::exception_ptr& why) {
  rref.*privateMember(RRefTimedOut{}) = true;
  if (rref.isOwner() && isOnlyHere(rref)) {
    static_cast<torch::distributed::rpc::OwnerRRef&>(rref).setError(why);
  }
}

} // namespace torch_rpc_ext::compat
