#pragma once

// The one header that depends on how a version of torch is made inside, for
// 2.11 <= torch < 3.

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace torch_rpc_ext::compat {

// torch keeps two objects for the life of a process that remember its first
// RPC agent: init_rpc a second time, with another rank, fails or sends through
// an agent that is no more (pytorch issue 46491). There is no public way to
// renew them. C++ lets an explicit instantiation name private members.
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
    RRefNextLocalId,
    torch::distributed::rpc::RRefContext,
    nextLocalId_)
TORCH_RPC_EXT_EXPOSE(RRefTimedOut, torch::distributed::rpc::RRef, timedOut_)
TORCH_RPC_EXT_EXPOSE(RRefType, torch::distributed::rpc::RRef, type_)

#undef TORCH_RPC_EXT_EXPOSE

// Before init_rpc: lets dist_autograd take a new worker id. To be called only
// while no agent runs.
inline void forgetAutogradWorker() {
  using torch::distributed::autograd::DistAutogradContainer;
  try {
    auto& container = DistAutogradContainer::getInstance();
    container.*privateMember(AutogradInitialized{}) = false;
  } catch (const std::exception&) {
    // It was never initialised: this is the first init_rpc.
  }
}

// The lives of a worker (agent/hello.h) in the ids that torch makes. An id of a
// context is the worker's, then a counter, which begins at 0 in each process.
// Here 16 bits of it are the worker's life.
constexpr int kContextWorkerShift = 48;
constexpr int kContextLifeShift = 32;
// An id of an RRef or fork is the worker's beside a counter. Here 23 bits of it
// are the greatest life that its maker had heard of, anybody's.
constexpr int kRRefLifeShift = 40;

constexpr int64_t lifeInContextId(uint32_t life) {
  return static_cast<int64_t>(life & 0xffff) << kContextLifeShift;
}

// The distributed autograd contexts of this process are of that life. Before
// the first one of a group.
inline void beginContextIds(uint32_t life) {
  using torch::distributed::autograd::DistAutogradContainer;
  constexpr int64_t kLife = lifeInContextId(0xffff);
  try {
    auto& next = DistAutogradContainer::getInstance().*
        privateMember(AutogradNextContext{});
    next = (next.load() & ~kLife) | lifeInContextId(life);
  } catch (const std::exception&) {
    // init_rpc has not initialised it: then there will be no contexts.
  }
}

// Releases the distributed autograd contexts that a worker began, those of its
// life `except` excepted, here and at the workers that this one knows of;
// returns how many there were here. torch can release a context, but cannot
// say which there are.
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
    return 0; // it was never initialised, or the group ends right now
  }
}

// Once `agent` exists and before it is current: RRefs go through it.
inline void renewRRefContext(
    const std::shared_ptr<torch::distributed::rpc::RpcAgent>& agent) {
  using torch::distributed::rpc::RpcAgent;
  using torch::distributed::rpc::RRefContext;
  auto& context = RRefContext::getInstance();
  // Declared const because upstream never changes it; the object is not.
  auto& held = const_cast<std::shared_ptr<RpcAgent>&>(
      context.*privateMember(RRefAgent{}));
  held = agent;
  context.*privateMember(RRefDestroyed{}) = false;
}

// From now on RRefs know of that life, so that no id is one that a former life
// of this worker made, whose values the others may still hold, and that it can
// be told from an id whether its RRef was made for a former life of its owner.
// Counting goes on in the bits below: within a process no id comes twice.
inline void beginRRefIds(uint32_t life) {
  constexpr int64_t kCounter = (int64_t{1} << kRRefLifeShift) - 1;
  auto& next = *privateMember(RRefNextLocalId{});
  int64_t before = next.load();
  while (!next.compare_exchange_weak(
      before,
      (static_cast<int64_t>(life) << kRRefLifeShift) | (before & kCounter))) {
  }
}

inline uint32_t lifeOfRRefs() {
  return static_cast<uint32_t>(
      *privateMember(RRefNextLocalId{}) >> kRRefLifeShift);
}

// Whether the RRef was made before its owner had that life.
inline bool isOlder(const torch::distributed::rpc::RRefId& id, uint32_t life) {
  return id.localId_ >> kRRefLifeShift < static_cast<int64_t>(life);
}

// RRef::handleError() keeps its handlers in a static table, and those hold the
// `this` of the first RRef that ever failed: every later time-out of an RRef's
// creation writes into that one, which is long freed. Here the first one is an
// RRef that lives for ever; failedToCreate() marks the right one. To be called
// before the first RRef.
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

// Takes back the RRefs to values here that a worker got from remote(), with
// `before` only those of its lives before that one, and returns the values that
// nobody else holds; these may need the GIL to go. torch waits for the worker
// to give them back. An RRef that was passed on counts for its new holder and
// stays: it is known by its number, because remote() draws those of the RRef
// and of its first fork one after the other.
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
      // Its own word that it lets go was still under way, and is there now.
    }
  }
  return values;
}

// Whether RRef::fork() can write the type down for another worker. It asks a
// tuple for its name, which only few have, and crashes; an enum's name means
// nothing where nobody has compiled it.
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

// Makes of the value's type that of a Python object, which has a name and whose
// value is fetched as a pickle. Only of an RRef that has its value here, which
// was made from Python and has never left: returns false for others.
inline bool becomePython(torch::distributed::rpc::RRef& rref) {
  namespace rpc = torch::distributed::rpc;
  if (!rref.isOwner() || !static_cast<rpc::OwnerRRef&>(rref).hasValue()) {
    return false;
  }
  const_cast<c10::TypePtr&>(rref.*privateMember(RRefType{})) =
      c10::PyObjectType::get();
  return true;
}

// What RRef::handleError() should have done.
inline void failedToCreate(torch::distributed::rpc::RRef& rref) {
  rref.*privateMember(RRefTimedOut{}) = true;
}

} // namespace torch_rpc_ext::compat
