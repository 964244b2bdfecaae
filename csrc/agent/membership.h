#pragma once

#include "agent/rpc_error.h"
#include "base/synchronized.h"

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent {

// Who is in the group, and the address of each member.
//
// Owns: the members, also those that left: references to their WorkerInfo stay
//   valid, as upstream's callers expect.
// Thread: any.
class Membership {
 public:
  using WorkerInfo = torch::distributed::rpc::WorkerInfo;
  using worker_id_t = torch::distributed::rpc::worker_id_t;

  // A worker that is started again has a greater `life` than before.
  struct Member {
    WorkerInfo info;
    std::string address;
    uint32_t life;
  };
  using MemberPtr = std::shared_ptr<const Member>;

  // Only a dynamic group's workers come and go.
  explicit Membership(bool isStatic);

  // The id of the group on the wire: random bytes that all members share, so
  // that a worker of another group is never taken for a member.
  void setGroup(std::string group);
  std::string group() const;

  // Adds a member, or replaces the member with this name.
  MemberPtr add(
      const std::string& name,
      worker_id_t id,
      std::string address,
      uint32_t life);
  void remove(const std::string& name);

  // All three throw the errors that users of upstream know if there is no such
  // member.
  const WorkerInfo& byName(const std::string& name) const;
  const WorkerInfo& byId(worker_id_t id) const;
  // Also of the worker that had this id last and has left the group: RRefs that
  // it owns still name it.
  const WorkerInfo& byIdOrFormer(worker_id_t id) const;

  // The error of a call to a worker that is not in the group. `who` and `why`
  // are for the text; `name` is the worker's, empty where only the rank is
  // known. The worker may still join a dynamic group.
  RpcError notFound(
      const std::string& who,
      const std::string& why,
      const std::string& name) const;

  std::vector<WorkerInfo> all() const;
  // Nothing for a name that is not in the group.
  std::optional<worker_id_t> idOf(const std::string& name) const;
  // Null for an id that is not in the group.
  MemberPtr find(worker_id_t id) const;

 private:
  struct State {
    std::string group;
    std::unordered_map<std::string, MemberPtr> byName;
    std::unordered_map<worker_id_t, MemberPtr> byId;
    std::vector<MemberPtr> former;
  };

  static void remove(State& state, const std::string& name);

  const bool isStatic_;
  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::agent
