// UcxAgent, what the group looks like: its members, their lives, its devices.

#include "agent/call_label.h"
#include "agent/ucx_agent.h"
#include "compat/torch_compat.h"

namespace torch_rpc_ext::agent {

void UcxAgent::setGroup(const std::string& id, const std::string& secret) {
  membership_.setGroup(id);
  remote_->setSecret(secret);
  compat::beginRRefIds(0); // adding the members makes it theirs
}

void UcxAgent::addMember(
    const std::string& name,
    rpc::worker_id_t id,
    std::string address,
    uint32_t life) {
  if (life > compat::lifeOfRRefs()) {
    // Before anybody can make an RRef there.
    compat::beginRRefIds(life);
  }
  const auto formerId = membership_.idOf(name);
  const auto former = formerId ? membership_.find(*formerId) : nullptr;
  membership_.add(name, id, std::move(address), life);
  if (id == workerInfo_.id_) {
    compat::beginContextIds(life);
    return;
  }
  if (former != nullptr && former->life < life) {
    const base::Error why{
        base::ErrorKind::kPeerLost,
        "worker \"" + name + "\" died, and has been started again"};
    for (const auto& connection : peers_.succeed(*membership_.find(id))) {
      connection->lose(why);
    }
    ipc_->gone(name, /*hasEnded=*/true);
    barrier_.regain(name);
    release(former, /*died=*/true);
  }
  events_.added(name, life); // last: who hears of it may call the worker
}

void UcxAgent::watch(rpc::worker_id_t id) {
  peers_.connection(id);
  // An attempt that fails at once has no connection whose end is reported.
  const std::string& name = membership_.byId(id).name_;
  if (peers_.isLost(name)) {
    events_.unreachable(name, /*left=*/false, peers_.whyLost(name));
  }
}

base::Error UcxAgent::ownerDied(const rpc::RRefId& rref, rpc::worker_id_t owner)
    const {
  const auto member = membership_.find(owner);
  if (member == nullptr || !compat::isOlder(rref, member->life)) {
    return {};
  }
  return {
      base::ErrorKind::kPeerLost,
      "the owner of this RRef died: worker \"" + member->info.name_ +
          "\" has been started again since the RRef was made"};
}

base::Error UcxAgent::ownerDied(
    const rpc::Message& message,
    rpc::worker_id_t owner) const {
  const auto member = membership_.find(owner);
  if (member == nullptr || member->life == 0) {
    return {}; // it has had one life only, as nearly all have
  }
  const auto rref = ownedRRef(message);
  return rref ? ownerDied(*rref, owner) : base::Error{};
}

std::string UcxAgent::address() const {
  return remote_->address();
}

const rpc::WorkerInfo& UcxAgent::getWorkerInfo(const std::string& name) const {
  return membership_.byName(name);
}

const rpc::WorkerInfo& UcxAgent::getWorkerInfo(rpc::worker_id_t id) const {
  return membership_.byId(id);
}

std::vector<rpc::WorkerInfo> UcxAgent::getWorkerInfos() const {
  return membership_.all();
}

void UcxAgent::setDeviceMaps(
    std::unordered_map<std::string, rpc::DeviceMap> deviceMaps,
    std::unordered_map<std::string, rpc::DeviceMap> reverseDeviceMaps,
    std::vector<c10::Device> devices) {
  devices_.set(
      std::move(deviceMaps), std::move(reverseDeviceMaps), std::move(devices));
}

rpc::DeviceMap UcxAgent::getDeviceMap(const rpc::WorkerInfo& to) const {
  const device::Map* const map = devices_.mapTo(to.name_);
  return map == nullptr ? rpc::DeviceMap{} : *map;
}

const std::vector<c10::Device>& UcxAgent::getDevices() const {
  return devices_.devices();
}

} // namespace torch_rpc_ext::agent
