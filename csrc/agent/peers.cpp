#include "agent/peers.h"

#include "compat/torch_compat.h"

#include <algorithm>
#include <stdexcept>

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
    const auto state = state_.lock();
    auto it = state->connections.find(id);
    if (it != state->connections.end() && !it->second->closed()) {
      return it->second;
    }
  }
  const bool self = id == self_.workerId;
  const auto member = membership_.find(id);
  if (member == nullptr) {
    const std::string& name = membership_.byIdOrFormer(id).name_;
    throw membership_.notFound(
        "\"" + name + "\"", "it has left the group", name);
  }
  const auto now = std::chrono::steady_clock::now();
  {
    const auto state = state_.lock();
    if (auto own = goneBy(*state, *member)) {
      return own;
    }
    // A worker that has come back at another address is tried at once.
    if (const auto* entry = unreachable(*state, *member)) {
      if (auto successor =
              openTo(*state, member->info.name_, member->life + 1)) {
        return successor; // the worker has come back, and connected to this one
      }
      if (transport::isGone(entry->connection->peer()) || now < entry->again) {
        return entry->connection;
      }
    }
  }
  if (!started()) {
    throw std::runtime_error(
        "RPC does not run yet on this worker: make calls after init_rpc() "
        "has returned");
  }
  auto made = self ? loopback_->connect(loopback_->address(), introduction())
                   : remote_->connect(member->address, introduction());
  auto state = state_.lock();
  if (const auto* entry = unreachable(*state, *member);
      entry != nullptr && transport::isGone(entry->connection->peer())) {
    // The worker has gone meanwhile. What was made ends by itself: nobody
    // answers, or onConnected() refuses the answer.
    return entry->connection;
  }
  if (made->closed()) {
    // The connection failed at once, and onClosed() did not know whose it was.
    // The call that is sent on it gets the reason; a call after the pause
    // connects anew.
    state->lost.try_emplace(
        member->info.name_, "a connection to it failed at once");
    auto& entry = state->unreachable[id];
    const bool repeated = entry.address == member->address;
    const auto pause =
        repeated ? std::min(2 * entry.pause, kLongestPause) : kFirstPause;
    entry = {made, member->address, now + pause, pause};
    return made;
  }
  state->unreachable.erase(id);
  state->known[made.get()] = {member->info.name_, member->life, made};
  // Another thread, or the peer, may have opened a connection meanwhile. Then
  // this one stays open and idle, because the peer may already be using it.
  auto& own = state->connections[id];
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
  auto state = state_.lock();
  enter(*state, connection, peer.value());
  if (member != nullptr && member->life < peer.value().life) {
    return {}; // the peer asks whether it may come back: see succeed()
  }
  state->lost.erase(peer.value().name);
  state->unreachable.erase(id);
  // This worker's calls use the connection too, unless another one is open.
  // This worker's own attempt to connect may wait long, for a network path that
  // is cut. The attempt goes on, because the peer may already be using it.
  auto& own = state->connections[id];
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
  const auto id = static_cast<worker_id_t>(peer.value().workerId);
  const auto member = membership_.find(id);
  auto state = state_.lock();
  const auto* entry =
      member == nullptr ? nullptr : unreachable(*state, *member);
  if (entry != nullptr && member->life == peer.value().life &&
      transport::isGone(entry->connection->peer())) {
    // This worker's attempt to connect began before the goodbye, and a worker
    // that stops still answers.
    return {
        base::ErrorKind::kShutDown,
        "worker \"" + peer.value().name + "\" has shut down"};
  }
  enter(*state, connection, peer.value());
  state->lost.erase(peer.value().name);
  return {};
}

void Peers::enter(
    State& state,
    const transport::ConnectionPtr& connection,
    Hello peer) {
  compat::raiseLifeOfRRefs(peer.life);
  state.known[connection.get()] = {std::move(peer.name), peer.life, connection};
}

const Peers::Unreachable* Peers::unreachable(
    const State& state,
    const Membership::Member& member) {
  const auto it = state.unreachable.find(member.info.id_);
  return it != state.unreachable.end() && it->second.address == member.address
      ? &it->second
      : nullptr;
}

transport::ConnectionPtr
Peers::openTo(const State& state, const std::string& name, uint32_t minLife) {
  for (const auto& [_, peer] : state.known) {
    auto connection = peer.connection.lock();
    if (peer.name == name && peer.life >= minLife && connection != nullptr &&
        !connection->closed()) {
      return connection;
    }
  }
  return nullptr;
}

transport::ConnectionPtr Peers::goneBy(
    const State& state,
    const Membership::Member& member) {
  const auto own = state.connections.find(member.info.id_);
  if (own == state.connections.end() ||
      !transport::isGone(own->second->peer())) {
    return nullptr;
  }
  const auto peer = state.known.find(own->second.get());
  return peer != state.known.end() && peer->second.life == member.life
      ? own->second
      : nullptr;
}

std::vector<transport::ConnectionPtr> Peers::succeed(
    const Membership::Member& member) {
  const auto id = static_cast<worker_id_t>(member.info.id_);
  std::vector<transport::ConnectionPtr> former;
  auto state = state_.lock();
  for (const auto& [_, peer] : state->known) {
    auto connection = peer.connection.lock();
    if (peer.name == member.info.name_ && peer.life < member.life &&
        connection != nullptr) {
      former.push_back(std::move(connection));
    }
  }
  state->connections.erase(id);
  if (auto own = openTo(*state, member.info.name_, member.life)) {
    state->connections[id] = std::move(own);
  }
  state->unreachable.erase(id);
  state->lost.erase(member.info.name_);
  return former;
}

std::optional<std::string> Peers::onClosed(
    const transport::ConnectionPtr& connection,
    const base::Error& error) {
  auto state = state_.lock();
  std::erase_if(state->connections, [&](const auto& entry) {
    return entry.second == connection;
  });
  auto it = state->known.find(connection.get());
  if (it == state->known.end()) {
    return std::nullopt; // a stranger that was refused
  }
  const Peer peer = std::move(it->second);
  const std::string& name = peer.name;
  state->known.erase(it);
  std::erase_if(state->ended, [](const auto& entry) {
    return entry.second.connection.expired();
  });
  state->ended[connection.get()] = peer;
  const auto id = membership_.idOf(name);
  const auto member = id ? membership_.find(*id) : nullptr;
  if (member != nullptr && member->life != peer.life) {
    return std::nullopt; // a later life has taken its place
  }
  // A goodbye or a death on one connection is that of the worker.
  const bool gone = transport::isGone(connection->peer());
  for (const auto& [other, otherPeer] : state->known) {
    if (!gone && otherPeer.name == name && otherPeer.life == peer.life &&
        !other->closed()) {
      return std::nullopt; // the worker is still there
    }
  }
  // The first reason tells most: later ones only say that the worker cannot be
  // connected to.
  std::string& why = state->lost[name];
  if (why.empty()) {
    why = error.message;
  }
  if ((gone || error.kind == base::ErrorKind::kPeerLost) && member != nullptr) {
    // Each attempt to connect costs a descriptor inside of UCX, so the next one
    // comes after a pause. An attempt that began before the worker was gone,
    // and ends later, does not make the worker one that may be reached again.
    auto& entry = state->unreachable[*id];
    if (entry.connection == nullptr || entry.address != member->address ||
        !transport::isGone(entry.connection->peer())) {
      entry = {
          connection,
          member->address,
          std::chrono::steady_clock::now() + kFirstPause,
          kFirstPause};
    }
  }
  return name;
}

std::vector<std::string> Peers::lost() const {
  const auto state = state_.lock();
  std::vector<std::string> names;
  for (const auto& entry : state->lost) {
    names.push_back(entry.first);
  }
  return names;
}

bool Peers::isLost(const std::string& name) const {
  return state_.lock()->lost.contains(name);
}

bool Peers::isGone(worker_id_t id) const {
  const auto member = membership_.find(id);
  if (member == nullptr) {
    return false;
  }
  const auto state = state_.lock();
  const auto* entry = unreachable(*state, *member);
  return entry != nullptr && transport::isGone(entry->connection->peer()) &&
      openTo(*state, member->info.name_, member->life + 1) == nullptr;
}

std::string Peers::whyLost(const std::string& name) const {
  const auto state = state_.lock();
  auto it = state->lost.find(name);
  return it == state->lost.end() ? std::string() : it->second;
}

std::string Peers::nameOf(const transport::Connection* connection) const {
  const auto state = state_.lock();
  auto it = state->known.find(connection);
  if (it != state->known.end()) {
    return it->second.name;
  }
  it = state->ended.find(connection);
  // The pointer may be that of an earlier connection at the same memory
  // address.
  if (it != state->ended.end() &&
      it->second.connection.lock().get() == connection) {
    return it->second.name;
  }
  return "an unknown worker";
}

std::optional<PeerLife> Peers::lifeOf(
    const transport::Connection* connection) const {
  const auto state = state_.lock();
  auto it = state->known.find(connection);
  return it == state->known.end()
      ? std::nullopt
      : std::optional(PeerLife{it->second.name, it->second.life});
}

uint32_t Peers::reachedLife(const Membership::Member& member) const {
  const auto state = state_.lock();
  if (unreachable(*state, member) == nullptr) {
    return member.life;
  }
  const auto successor = openTo(*state, member.info.name_, member.life + 1);
  return successor == nullptr ? member.life
                              : state->known.at(successor.get()).life;
}

std::map<std::string, transport::PathInfo> Peers::paths() const {
  std::map<std::string, transport::ConnectionPtr> connections;
  {
    const auto state = state_.lock();
    for (const auto& entry : state->connections) {
      auto peer = state->known.find(entry.second.get());
      if (peer != state->known.end()) {
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
  return state_.lock()->connections.size();
}

} // namespace torch_rpc_ext::agent
