#include "agent/peers.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torch_rpc_ext::agent {

namespace {

// Between attempts to connect to a worker that cannot be reached.
constexpr std::chrono::milliseconds kFirstPause{1000};
constexpr std::chrono::milliseconds kLongestPause{5000};

} // namespace

Peers::Peers(
    const Membership& membership,
    Hello self,
    std::shared_ptr<transport::Context> remote,
    std::shared_ptr<transport::Context> loopback)
    : membership_(membership),
      self_(std::move(self)),
      remote_(std::move(remote)),
      loopback_(std::move(loopback)) {}

std::string Peers::introduction() const {
  Hello hello = self_;
  hello.group = membership_.group();
  return encode(hello);
}

transport::ConnectionPtr Peers::connection(worker_id_t id) {
  {
    std::lock_guard lock(mutex_);
    auto it = connections_.find(id);
    if (it != connections_.end() && !it->second->closed()) {
      return it->second;
    }
  }
  const bool self = id == self_.workerId;
  const auto member = membership_.find(id);
  TORCH_CHECK(
      member.has_value(),
      "could not find destination worker with id ",
      id,
      ": it is not in the group, or has left it");
  const auto now = std::chrono::steady_clock::now();
  {
    std::lock_guard lock(mutex_);
    auto it = unreachable_.find(id);
    // One that has come back elsewhere is tried at once.
    if (it != unreachable_.end() && it->second.address == member->second &&
        now < it->second.again) {
      return it->second.connection;
    }
  }
  auto made = self ? loopback_->connect(loopback_->address(), introduction())
                   : remote_->connect(member->second, introduction());
  std::lock_guard lock(mutex_);
  if (made->closed()) {
    // It failed at once, and its onClosed() is over: the call that is sent on
    // it learns why, the next one connects anew.
    lost_.try_emplace(member->first);
    auto& entry = unreachable_[id];
    const bool repeated = entry.address == member->second;
    const auto pause =
        repeated ? std::min(2 * entry.pause, kLongestPause) : kFirstPause;
    entry = {made, member->second, now + pause, pause};
    return made;
  }
  unreachable_.erase(id);
  names_[made.get()] = member->first;
  // Another thread, or the peer, may have been quicker. Then ours stays idle:
  // the peer may already be using it.
  auto& own = connections_[id];
  if (own == nullptr || own->closed()) {
    own = made;
  }
  return own;
}

base::Result<Hello> Peers::check(const std::string& bytes) const {
  auto hello = parseHello(bytes);
  if (!hello.ok()) {
    return hello;
  }
  if (hello.value().group != membership_.group()) {
    return base::Error{
        base::ErrorKind::kRefused,
        "worker \"" + hello.value().name +
            "\" belongs to another RPC group than \"" + self_.name + "\""};
  }
  return hello;
}

base::Error Peers::onAccept(
    const transport::ConnectionPtr& connection,
    const std::string& bytes) {
  auto peer = check(bytes);
  if (!peer.ok()) {
    return peer.error();
  }
  std::lock_guard lock(mutex_);
  names_[connection.get()] = peer.value().name;
  lost_.erase(peer.value().name);
  unreachable_.erase(static_cast<worker_id_t>(peer.value().workerId));
  // Our own calls use it too, unless we have one that works.
  auto& own = connections_[static_cast<worker_id_t>(peer.value().workerId)];
  if (own == nullptr || own->closed()) {
    own = connection;
  }
  return {};
}

base::Error Peers::onConnected(
    const transport::ConnectionPtr& connection,
    const std::string& bytes) {
  auto peer = check(bytes);
  if (!peer.ok()) {
    return peer.error();
  }
  std::lock_guard lock(mutex_);
  names_[connection.get()] = peer.value().name;
  lost_.erase(peer.value().name);
  return {};
}

std::optional<std::string> Peers::onClosed(
    const transport::ConnectionPtr& connection,
    const base::Error& error) {
  std::lock_guard lock(mutex_);
  std::erase_if(connections_, [&](const auto& entry) {
    return entry.second == connection;
  });
  auto it = names_.find(connection.get());
  if (it == names_.end()) {
    return std::nullopt; // a stranger that was refused
  }
  const std::string name = std::move(it->second);
  names_.erase(it);
  for (const auto& [other, otherName] : names_) {
    if (otherName == name && !other->closed()) {
      return std::nullopt; // the worker is still there
    }
  }
  // The first reason is the one that tells most: later ones say that there is
  // nobody to connect to.
  std::string& why = lost_[name];
  if (why.empty()) {
    why = error.message;
  }
  if (error.kind == base::ErrorKind::kPeerLost) {
    if (const auto id = membership_.idOf(name)) {
      const auto member = membership_.find(*id);
      unreachable_[*id] = {
          connection,
          member ? member->second : std::string(),
          std::chrono::steady_clock::now() + kFirstPause,
          kFirstPause};
    }
  }
  return name;
}

std::vector<std::string> Peers::lost() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& entry : lost_) {
    names.push_back(entry.first);
  }
  return names;
}

std::string Peers::whyLost(const std::string& name) const {
  std::lock_guard lock(mutex_);
  auto it = lost_.find(name);
  return it == lost_.end() ? std::string() : it->second;
}

std::string Peers::nameOf(const transport::Connection* connection) const {
  std::lock_guard lock(mutex_);
  auto it = names_.find(connection);
  return it == names_.end() ? "an unknown worker" : it->second;
}

std::map<std::string, transport::PathInfo> Peers::paths() const {
  std::map<std::string, transport::ConnectionPtr> connections;
  {
    std::lock_guard lock(mutex_);
    for (const auto& entry : connections_) {
      auto name = names_.find(entry.second.get());
      if (name != names_.end()) {
        connections[name->second] = entry.second;
      }
    }
  }
  std::map<std::string, transport::PathInfo> paths;
  for (const auto& [name, connection] : connections) {
    paths[name] = connection->path();
  }
  return paths;
}

size_t Peers::size() const {
  std::lock_guard lock(mutex_);
  return connections_.size();
}

} // namespace torch_rpc_ext::agent
