#pragma once

#include "agent/hello.h"
#include "agent/membership.h"
#include "base/error.h"
#include "transport/transport.h"

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent {

// Which worker, and which of its lives.
struct PeerLife {
  std::string name;
  uint32_t life = 0;
};

// The connections to other workers, opened at the first call, whoever makes
// it; a call to oneself goes through a loopback context.
//
// Owns: the connections.
// Thread: any. Never calls into a transport while it holds its lock: the
//   transport calls onAccept() under its own.
class Peers {
 public:
  using worker_id_t = Membership::worker_id_t;

  Peers(
      const Membership& membership,
      Hello self,
      std::shared_ptr<transport::Context> remote,
      std::shared_ptr<transport::Context> loopback);

  // An open or opening connection. Throws when there is no such worker.
  transport::ConnectionPtr connection(worker_id_t id);

  // What Handler asks when a peer introduces itself.
  std::string introduction() const;
  base::Error onAccept(
      const transport::ConnectionPtr& connection,
      const std::string& hello);
  base::Error onConnected(
      const transport::ConnectionPtr& connection,
      const std::string& hello);
  // Returns the worker that went away with this connection, if one did.
  std::optional<std::string> onClosed(
      const transport::ConnectionPtr& connection,
      const base::Error& error);

  // The connections to former lives of a member, which are no more; its own
  // are used from now on.
  std::vector<transport::ConnectionPtr> succeed(const Membership::Member&);

  // The workers whose last connection has ended and that have not come back.
  std::vector<std::string> lost() const;
  bool isLost(const std::string& name) const;
  // What its last connection ended with; empty for one that is not lost.
  std::string whyLost(const std::string& name) const;

  // The worker at the other end; for a connection that was never established,
  // the one it was meant for. As long as the connection lives, also after its
  // end.
  std::string nameOf(const transport::Connection* connection) const;
  std::optional<PeerLife> lifeOf(const transport::Connection* connection) const;

  // Worker name -> path, of the connections there are.
  std::map<std::string, transport::PathInfo> paths() const;
  size_t size() const;

 private:
  // A worker that could not be connected to, at that address, and when to try
  // again: a call to a dead one must not cost an attempt each time.
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

  base::Result<Hello> check(const std::string& bytes) const;
  // An open connection to such a worker, of that life or a greater one; null
  // if there is none. Under the lock.
  transport::ConnectionPtr openTo(const std::string& name, uint32_t minLife)
      const;

  const Membership& membership_;
  const Hello self_;
  const std::shared_ptr<transport::Context> remote_;
  const std::shared_ptr<transport::Context> loopback_;

  mutable std::mutex mutex_;
  std::unordered_map<worker_id_t, transport::ConnectionPtr> connections_;
  std::unordered_map<const transport::Connection*, Peer> known_;
  // Those whose connection has ended; entries stay while somebody refers to it.
  std::unordered_map<const transport::Connection*, Peer> ended_;
  std::unordered_map<worker_id_t, Unreachable> unreachable_;
  std::map<std::string, std::string> lost_; // name -> why
};

} // namespace torch_rpc_ext::agent
