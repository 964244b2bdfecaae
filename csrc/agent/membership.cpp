#include "agent/membership.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>

namespace torch_rpc_ext::agent {

namespace {

// Enough names for an error text to show the mistake, without all names of a
// large group.
constexpr size_t kNamesShown = 8;

} // namespace

void Membership::setGroup(std::string group) {
  std::unique_lock lock(mutex_);
  group_ = std::move(group);
}

std::string Membership::group() const {
  std::shared_lock lock(mutex_);
  return group_;
}

void Membership::add(
    const std::string& name,
    worker_id_t id,
    std::string address,
    uint32_t life) {
  auto member = std::make_shared<const Member>(
      Member{WorkerInfo(name, id), std::move(address), life});
  std::unique_lock lock(mutex_);
  removeLocked(name);
  byName_[name] = member;
  byId_[id] = member;
}

void Membership::remove(const std::string& name) {
  std::unique_lock lock(mutex_);
  removeLocked(name);
}

void Membership::removeLocked(const std::string& name) {
  auto it = byName_.find(name);
  if (it == byName_.end()) {
    return;
  }
  auto byId = byId_.find(it->second->info.id_);
  if (byId != byId_.end() && byId->second == it->second) {
    byId_.erase(byId);
  }
  former_.push_back(std::move(it->second));
  byName_.erase(it);
}

const Membership::WorkerInfo& Membership::byName(
    const std::string& name) const {
  std::shared_lock lock(mutex_);
  auto it = byName_.find(name);
  if (it == byName_.end()) {
    std::vector<std::string> names;
    for (const auto& entry : byName_) {
      names.push_back(entry.first);
    }
    std::sort(names.begin(), names.end());
    std::string text;
    for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) {
      text += (i == 0 ? "" : ", ") + names[i];
    }
    TORCH_CHECK(
        false,
        "could not find destination worker \"",
        name,
        "\": the group has ",
        names.size(),
        " workers: ",
        text,
        names.size() > kNamesShown ? ", ..." : "");
  }
  return it->second->info;
}

const Membership::WorkerInfo& Membership::byId(worker_id_t id) const {
  std::shared_lock lock(mutex_);
  auto it = byId_.find(id);
  TORCH_CHECK(
      it != byId_.end(),
      "could not find destination worker with id ",
      id,
      " in a group of ",
      byId_.size(),
      " workers");
  return it->second->info;
}

std::vector<Membership::WorkerInfo> Membership::all() const {
  std::shared_lock lock(mutex_);
  std::vector<WorkerInfo> infos;
  infos.reserve(byName_.size());
  for (const auto& entry : byName_) {
    infos.push_back(entry.second->info);
  }
  return infos;
}

std::optional<Membership::worker_id_t> Membership::idOf(
    const std::string& name) const {
  std::shared_lock lock(mutex_);
  auto it = byName_.find(name);
  if (it == byName_.end()) {
    return std::nullopt;
  }
  return it->second->info.id_;
}

Membership::MemberPtr Membership::find(worker_id_t id) const {
  std::shared_lock lock(mutex_);
  auto it = byId_.find(id);
  return it == byId_.end() ? nullptr : it->second;
}

} // namespace torch_rpc_ext::agent
