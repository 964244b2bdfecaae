#include "agent/peers.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torch_rpc_ext::agent {

namespace {

// Pauses between attempts to connect to a worker that cannot be reached.
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
  if (const auto self = membership_.find(self_.workerId)) {
    hello.life = self->life;
  }
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
      member != nullptr,
      "could not find destination worker with id ",
      id,
      ": it is not in the group, or has left it");
  const auto now = std::chrono::steady_clock::now();
  {
    std::lock_guard lock(mutex_);
    auto it = unreachable_.find(id);
    // A worker that has come back at another address is tried at once.
    if (it != unreachable_.end() && it->second.address == member->address) {
      if (auto successor = openTo(member->info.name_, member->life + 1)) {
        return successor; // the worker has come back, and connected to this one
      }
      // A dead process does not come back at the same address.
      const bool isDead =
          it->second.connection->peer() == transport::PeerState::kDead;
      if (isDead || now < it->second.again) {
        return it->second.connection;
      }
    }
  }
  auto made = self ? loopback_->connect(loopback_->address(), introduction())
                   : remote_->connect(member->address, introduction());
  std::lock_guard lock(mutex_);
  if (made->closed()) {
    // The connection failed at once, and onClosed() did not know whose it was.
    // The call that is sent on it gets the reason; a call after the pause
    // connects anew.
    lost_.try_emplace(member->info.name_, "a connection to it failed at once");
    auto& entry = unreachable_[id];
    const bool repeated = entry.address == member->address;
    const auto pause =
        repeated ? std::min(2 * entry.pause, kLongestPause) : kFirstPause;
    entry = {made, member->address, now + pause, pause};
    return made;
  }
  unreachable_.erase(id);
  known_[made.get()] = {member->info.name_, member->life, made};
  // Another thread, or the peer, may have opened a connection meanwhile. Then
  // this one stays open and idle, because the peer may already be using it.
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
  const auto member =
      membership_.find(static_cast<worker_id_t>(hello.value().workerId));
  if (member != nullptr && hello.value().life < member->life) {
    return base::Error{
        base::ErrorKind::kRefused,
        "worker \"" + hello.value().name +
            "\" was taken for dead and has been started again: this process "
            "is no longer the group's"};
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
  const auto id = static_cast<worker_id_t>(peer.value().workerId);
  const auto member = membership_.find(id);
  std::lock_guard lock(mutex_);
  known_[connection.get()] = {peer.value().name, peer.value().life, connection};
  if (member != nullptr && member->life < peer.value().life) {
    return {}; // it asks whether it may come back; succeed() records that
  }
  lost_.erase(peer.value().name);
  unreachable_.erase(id);
  // This worker's calls use the connection too, unless there is one that works.
  // An attempt of this worker's may wait long, for a way that is cut; the peer
  // may use that attempt yet, so it goes on.
  auto& own = connections_[id];
  if (own == nullptr || own->closed() ||
      own->peer() == transport::PeerState::kConnecting) {
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
  known_[connection.get()] = {peer.value().name, peer.value().life, connection};
  lost_.erase(peer.value().name);
  return {};
}

transport::ConnectionPtr Peers::openTo(
    const std::string& name,
    uint32_t minLife) const {
  for (const auto& [_, peer] : known_) {
    auto connection = peer.connection.lock();
    if (peer.name == name && peer.life >= minLife && connection != nullptr &&
        !connection->closed()) {
      return connection;
    }
  }
  return nullptr;
}

std::vector<transport::ConnectionPtr> Peers::succeed(
    const Membership::Member& member) {
  const auto id = static_cast<worker_id_t>(member.info.id_);
  std::vector<transport::ConnectionPtr> former;
  std::lock_guard lock(mutex_);
  for (const auto& [_, peer] : known_) {
    auto connection = peer.connection.lock();
    if (peer.name == member.info.name_ && peer.life < member.life &&
        connection != nullptr) {
      former.push_back(std::move(connection));
    }
  }
  connections_.erase(id);
  if (auto own = openTo(member.info.name_, member.life)) {
    connections_[id] = std::move(own);
  }
  unreachable_.erase(id);
  lost_.erase(member.info.name_);
  return former;
}

std::optional<std::string> Peers::onClosed(
    const transport::ConnectionPtr& connection,
    const base::Error& error) {
  std::lock_guard lock(mutex_);
  std::erase_if(connections_, [&](const auto& entry) {
    return entry.second == connection;
  });
  auto it = known_.find(connection.get());
  if (it == known_.end()) {
    return std::nullopt; // a stranger that was refused
  }
  const Peer peer = std::move(it->second);
  const std::string& name = peer.name;
  known_.erase(it);
  std::erase_if(ended_, [](const auto& entry) {
    return entry.second.connection.expired();
  });
  ended_[connection.get()] = peer;
  const auto id = membership_.idOf(name);
  const auto member = id ? membership_.find(*id) : nullptr;
  if (member != nullptr && member->life != peer.life) {
    return std::nullopt; // a later life has taken its place
  }
  for (const auto& [other, otherPeer] : known_) {
    if (otherPeer.name == name && otherPeer.life == peer.life &&
        !other->closed()) {
      return std::nullopt; // the worker is still there
    }
  }
  // The first reason tells most: later ones only say that the worker cannot be
  // connected to.
  std::string& why = lost_[name];
  if (why.empty()) {
    why = error.message;
  }
  if (error.kind == base::ErrorKind::kPeerLost && member != nullptr) {
    // Each attempt to connect costs a descriptor inside of UCX, so the next one
    // comes after a pause.
    unreachable_[*id] = {
        connection,
        member->address,
        std::chrono::steady_clock::now() + kFirstPause,
        kFirstPause};
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

bool Peers::isLost(const std::string& name) const {
  std::lock_guard lock(mutex_);
  return lost_.contains(name);
}

std::string Peers::whyLost(const std::string& name) const {
  std::lock_guard lock(mutex_);
  auto it = lost_.find(name);
  return it == lost_.end() ? std::string() : it->second;
}

std::string Peers::nameOf(const transport::Connection* connection) const {
  std::lock_guard lock(mutex_);
  auto it = known_.find(connection);
  if (it != known_.end()) {
    return it->second.name;
  }
  it = ended_.find(connection);
  // The pointer may be that of an earlier connection at the same memory
  // address.
  if (it != ended_.end() && it->second.connection.lock().get() == connection) {
    return it->second.name;
  }
  return "an unknown worker";
}

std::optional<PeerLife> Peers::lifeOf(
    const transport::Connection* connection) const {
  std::lock_guard lock(mutex_);
  auto it = known_.find(connection);
  return it == known_.end()
      ? std::nullopt
      : std::optional(PeerLife{it->second.name, it->second.life});
}

std::map<std::string, transport::PathInfo> Peers::paths() const {
  std::map<std::string, transport::ConnectionPtr> connections;
  {
    std::lock_guard lock(mutex_);
    for (const auto& entry : connections_) {
      auto peer = known_.find(entry.second.get());
      if (peer != known_.end()) {
        connections[peer->second.name] = entry.second;
      }
    }
  }
  std::map<std::string, transport::PathInfo> paths;
  for (const auto& [name, connection] : connections) {
    auto& path = paths[name] = connection->path();
    path.state = transport::toString(connection->peer());
  }
  return paths;
}

size_t Peers::size() const {
  std::lock_guard lock(mutex_);
  return connections_.size();
}

} // namespace torch_rpc_ext::agent
