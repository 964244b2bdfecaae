#include "agent/membership.h"

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::agent {

namespace {

// Enough names for an error text to show the mistake, without all names of a
// large group.
constexpr size_t kNamesShown = 8;

} // namespace

Membership::Membership(bool isStatic) : isStatic_(isStatic) {}

void Membership::setGroup(std::string group) {
  state_.lock()->group = std::move(group);
}

std::string Membership::group() const {
  return state_.lock()->group;
}

Membership::MemberPtr Membership::add(
    const std::string& name,
    worker_id_t id,
    std::string address,
    uint32_t life) {
  auto member = std::make_shared<const Member>(
      Member{WorkerInfo(name, id), std::move(address), life});
  auto state = state_.lock();
  remove(*state, name);
  state->byName[name] = member;
  state->byId[id] = member;
  return member;
}

void Membership::remove(const std::string& name) {
  remove(*state_.lock(), name);
}

void Membership::remove(State& state, const std::string& name) {
  auto it = state.byName.find(name);
  if (it == state.byName.end()) {
    return;
  }
  auto byId = state.byId.find(it->second->info.id_);
  if (byId != state.byId.end() && byId->second == it->second) {
    state.byId.erase(byId);
  }
  state.former.push_back(std::move(it->second));
  state.byName.erase(it);
}

const Membership::WorkerInfo& Membership::byName(
    const std::string& name) const {
  const auto state = state_.lock();
  auto it = state->byName.find(name);
  if (it == state->byName.end()) {
    std::vector<std::string> names;
    for (const auto& entry : state->byName) {
      names.push_back(entry.first);
    }
    std::sort(names.begin(), names.end());
    std::string text;
    for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) {
      text += (i == 0 ? "" : ", ") + names[i];
    }
    throw notFound(
        "\"" + name + "\"",
        "the group has " + std::to_string(names.size()) + " workers: " + text +
            (names.size() > kNamesShown ? ", ..." : ""),
        name);
  }
  return it->second->info;
}

const Membership::WorkerInfo& Membership::byId(worker_id_t id) const {
  const auto state = state_.lock();
  auto it = state->byId.find(id);
  if (it == state->byId.end()) {
    throw notFound(
        "with id " + std::to_string(id),
        "the group has " + std::to_string(state->byId.size()) + " workers",
        "");
  }
  return it->second->info;
}

const Membership::WorkerInfo& Membership::byIdOrFormer(worker_id_t id) const {
  {
    const auto state = state_.lock();
    if (auto it = state->byId.find(id); it != state->byId.end()) {
      return it->second->info;
    }
    const auto& former = state->former;
    const auto last =
        std::find_if(former.rbegin(), former.rend(), [&](const auto& member) {
          return member->info.id_ == id;
        });
    if (last != former.rend()) {
      return (*last)->info;
    }
  }
  return byId(id); // throws, or the worker has come meanwhile
}

RpcError Membership::notFound(
    const std::string& who,
    const std::string& why,
    const std::string& name) const {
  return {
      isStatic_ ? base::ErrorKind::kRefused : base::ErrorKind::kNotInGroup,
      name,
      "could not find destination worker " + who + ": " + why};
}

std::vector<Membership::WorkerInfo> Membership::all() const {
  const auto state = state_.lock();
  std::vector<WorkerInfo> infos;
  infos.reserve(state->byName.size());
  for (const auto& entry : state->byName) {
    infos.push_back(entry.second->info);
  }
  return infos;
}

std::optional<Membership::worker_id_t> Membership::idOf(
    const std::string& name) const {
  const auto state = state_.lock();
  auto it = state->byName.find(name);
  if (it == state->byName.end()) {
    return std::nullopt;
  }
  return it->second->info.id_;
}

Membership::MemberPtr Membership::find(worker_id_t id) const {
  const auto state = state_.lock();
  auto it = state->byId.find(id);
  return it == state->byId.end() ? nullptr : it->second;
}

} // namespace torch_rpc_ext::agent
