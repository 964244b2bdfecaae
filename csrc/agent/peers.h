#pragma once

#include "agent/hello.h"
#include "agent/membership.h"
#include "base/error.h"
#include "base/synchronized.h"
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent {

// A worker and which of its lives (Hello::life) a connection belongs to.
struct PeerLife {
  std::string name;
  uint32_t life = 0;
};

// The connections to other workers. The first call between two workers opens a
// connection, and both workers use it. A call to this worker itself goes
// through a loopback context.
//
// Owns: the connections.
// Thread: any. With state_ locked, asks connections only for peer() and
//   closed(): the transport calls onAccept() with its own lock held.
class Peers {
 public:
  using worker_id_t = Membership::worker_id_t;

  Peers(
      const Membership& membership,
      Hello self,
      std::shared_ptr<transport::Context> remote,
      std::shared_ptr<transport::Context> loopback);

  // From now on connection() may connect: the contexts have been started.
  void start() {
    started_.store(true);
  }
  bool started() const {
    return started_.load();
  }
  // A connection to a worker: open or opening; or closed, where the worker
  // cannot be reached: then each send() on it fails with the reason. Throws
  // when the group has no such worker, and before start(): the user's threads
  // may call while init_rpc() is still at work.
  transport::ConnectionPtr connection(worker_id_t id);

  // These answer the methods of transport::Handler with the same names.
  std::string introduction() const;
  base::Error onAccept(
      const transport::ConnectionPtr& connection,
      const std::string& hello);
  base::Error onConnected(
      const transport::ConnectionPtr& connection,
      const std::string& hello);
  // Returns the name of the worker if this was the last connection to it; for
  // each of its connections if the worker has said goodbye or has died.
  std::optional<std::string> onClosed(
      const transport::ConnectionPtr& connection,
      const base::Error& error);

  // A member has been started again: uses only connections to its present life
  // from now on. Returns those to its former lives.
  std::vector<transport::ConnectionPtr> succeed(const Membership::Member&);

  // The lost workers: their last connection has ended, and they have not come
  // back.
  std::vector<std::string> lost() const;
  bool isLost(const std::string& name) const;
  // Whether the worker, in the life that this worker knows of, has died or has
  // left, and has not come back.
  bool isGone(worker_id_t id) const;
  // Why the last connection of a lost worker ended; empty for a worker that is
  // not lost.
  std::string whyLost(const std::string& name) const;

  // The worker at the other end; for a connection that was never established,
  // the worker to connect to. nameOf() also knows a connection that has ended,
  // as long as somebody refers to it; lifeOf() does not.
  std::string nameOf(const transport::Connection* connection) const;
  std::optional<PeerLife> lifeOf(const transport::Connection* connection) const;

  // The life that a call to the member reaches now. That is a later life than
  // the member's if the member is lost and has come back, and this worker has
  // not yet been told.
  uint32_t reachedLife(const Membership::Member& member) const;

  // Worker name -> path, for each connection that calls use.
  std::map<std::string, transport::PathInfo> paths() const;
  size_t size() const;

 private:
  // A worker that could not be reached at `address`, or has left, and when to
  // try again: calls to a dead worker must not each cost an attempt.
  struct Unreachable {
    transport::ConnectionPtr connection; // closed; tells each call why
    std::string address;
    std::chrono::steady_clock::time_point again;
    std::chrono::milliseconds pause;
  };

  // The worker at the other end of a connection.
  struct Peer {
    std::string name;
    uint32_t life;
    std::weak_ptr<transport::Connection> connection;
  };

  struct State {
    std::unordered_map<worker_id_t, transport::ConnectionPtr> connections;
    std::unordered_map<const transport::Connection*, Peer> known;
    // Connections that have ended, for nameOf(). Expired entries are erased
    // later.
    std::unordered_map<const transport::Connection*, Peer> ended;
    std::unordered_map<worker_id_t, Unreachable> unreachable;
    std::map<std::string, std::string> lost; // worker name -> why
  };

  base::Result<Hello> check(const std::string& bytes) const;
  // Notes who is at the other end of a connection. Calls may reach the peer
  // from here on, so new RRefs carry its life.
  static void
  enter(State& state, const transport::ConnectionPtr& connection, Hello peer);
  // What is noted of a member that cannot be reached at its present address;
  // null if nothing is.
  static const Unreachable* unreachable(
      const State& state,
      const Membership::Member& member);
  // An open connection to the worker of this name, in life `minLife` or a later
  // one; null if there is none.
  static transport::ConnectionPtr
  openTo(const State& state, const std::string& name, uint32_t minLife);
  // The connection over which a member has said goodbye, or was seen to die,
  // between that and onClosed(); null if there is none.
  static transport::ConnectionPtr goneBy(
      const State& state,
      const Membership::Member& member);

  const Membership& membership_;
  const Hello self_;
  const std::shared_ptr<transport::Context> remote_;
  const std::shared_ptr<transport::Context> loopback_;
  std::atomic<bool> started_{false};
  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::agent
