#pragma once

// The one header that depends on how a version of torch is made inside, for
// 2.11 <= torch < 3.

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
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

// Releases the distributed autograd contexts that a worker began, here and at
// the workers that this one knows of; returns how many there were here. torch
// can release a context, but cannot say which there are.
inline size_t releaseAutogradOf(torch::distributed::rpc::worker_id_t worker) {
  using torch::distributed::autograd::DistAutogradContainer;
  constexpr int kWorkerShift = 48; // an id is the worker's, then a counter
  try {
    auto& container = DistAutogradContainer::getInstance();
    std::vector<int64_t> ids;
    for (auto& shard : container.*privateMember(AutogradContexts{})) {
      std::lock_guard lock(shard.lock);
      for (const auto& entry : shard.contexts) {
        if (entry.first >> kWorkerShift == worker) {
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

// An id is the worker's, then a counter from 0: a worker that comes back would
// make the ids of its former life again, and be given the values that the
// others still hold for those. To be called once, before the first RRef of a
// process whose name may have had another life.
inline void beginRRefIdsAtRandom() {
  std::random_device source;
  // 2^32 RRefs until the next start.
  const int64_t start = static_cast<int64_t>(source() & 0x3fffffff) << 32;
  *privateMember(RRefNextLocalId{}) = start;
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

// Takes back the RRefs to values here that a worker got from remote(), and
// returns the values that nobody else holds; these may need the GIL to go.
// torch waits for the worker to give them back. An RRef that was passed on
// counts for its new holder and stays: it is known by its number, because
// remote() draws those of the RRef and of its first fork one after the other.
inline std::vector<c10::intrusive_ptr<torch::distributed::rpc::RRef>>
releaseRRefsOf(torch::distributed::rpc::worker_id_t worker) {
  namespace rpc = torch::distributed::rpc;
  auto& context = rpc::RRefContext::getInstance();
  std::vector<std::pair<rpc::RRefId, rpc::ForkId>> held;
  {
    std::lock_guard lock(context.*privateMember(RRefMutex{}));
    for (const auto& [id, forks] : context.*privateMember(RRefForks{})) {
      const rpc::ForkId first(id.createdOn_, id.localId_ + 1);
      if (id.createdOn_ == worker && forks.count(first) != 0) {
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

// What RRef::handleError() should have done.
inline void failedToCreate(torch::distributed::rpc::RRef& rref) {
  rref.*privateMember(RRefTimedOut{}) = true;
}

} // namespace torch_rpc_ext::compat
