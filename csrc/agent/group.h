#pragma once

#include "agent/agent_hooks.h"
#include "agent/agent_metrics.h"
#include "agent/barrier.h"
#include "agent/membership.h"
#include "agent/peers.h"
#include "agent/worker_events.h"
#include "base/poller.h"
#include "base/task.h"
#include "transport/transport.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

namespace torch_rpc_ext::agent {

// The workers of the group: who they are, how to reach each of them, and what
// follows when a worker is lost, leaves, or is started again.
//
// Owns: the members, the transports, the connections, the events, and the
//   barrier of the shutdown.
// Thread: any.
// Outlives: the transports' callbacks, which end with stop().
class Group {
 public:
  using WorkerInfo = Membership::WorkerInfo;
  using worker_id_t = Membership::worker_id_t;

  // What other parts do when a connection or a worker is lost. Called without
  // any lock.
  struct Listeners {
    // A connection has ended, and with it everything that was under way over
    // it. Called before `lost`.
    std::function<void(const transport::ConnectionPtr&, const base::Error&)>
        ended;
    // A worker cannot be reached any more. `exited`: its process has ended too,
    // so it no longer reads from this worker's devices.
    std::function<void(const std::string& worker, bool exited)> lost;
    // Drops references to values that may be Python objects. May be null.
    std::function<void(RRefs)> dropValues;
  };

  // `runner` outlives the Group.
  Group(
      const WorkerInfo& self,
      bool isStatic,
      std::shared_ptr<transport::Context> remote,
      std::shared_ptr<transport::Context> loopback,
      base::TaskRunner& runner,
      Listeners listeners);

  // Starts the transports, which call `handler` from here on. Each method of
  // `handler` except onFrame() and onFrameAhead() calls the function below of
  // the same name.
  void start(base::Poller& poller, transport::Handler& handler);
  std::string introduction() const;
  base::Error onAccept(
      const transport::ConnectionPtr& connection,
      const std::string& hello);
  base::Error onConnected(
      const transport::ConnectionPtr& connection,
      const std::string& hello);
  void onClosed(
      const transport::ConnectionPtr& connection,
      const base::Error& error);

  // This worker.
  const WorkerInfo& self() const {
    return self_;
  }
  // What other members need to connect to this worker.
  std::string address() const;
  bool isStatic() const {
    return isStatic_;
  }

  // Sets what all members share: the group's id, and the secret that lets them
  // connect. To be called before add() and before the first connection.
  void setSecret(const std::string& id, const std::string& secret);
  // Adds a member. A member whose `life` is greater than before has been
  // started again: it takes the place of its former life, which is dead.
  void add(
      const std::string& name,
      worker_id_t id,
      std::string address,
      uint32_t life);
  void remove(const std::string& name);

  // Connects to a worker, so that its death will be noticed.
  void watch(worker_id_t id);
  // Whether a worker is not known to be lost. Connects to the worker, so that
  // its death will be noticed. Throws for a worker that is not in the group.
  bool isAlive(const std::string& worker);
  // An error if the RRef's owner has died since the RRef was made and has been
  // started again. Without a new start there is no error: calls to the dead
  // owner fail by themselves.
  base::Error ownerDied(
      const torch::distributed::rpc::RRefId& rref,
      worker_id_t owner) const;
  // The same for a message that is about an RRef of its receiver.
  base::Error ownerDied(
      const torch::distributed::rpc::Message& message,
      worker_id_t owner) const;

  const Membership& membership() const {
    return membership_;
  }
  Peers& peers() {
    return peers_;
  }
  const Peers& peers() const {
    return peers_;
  }
  WorkerEvents& events() {
    return events_;
  }
  Barrier& barrier() {
    return barrier_;
  }

  // Gives memory of the transport back; see transport::Context::trim().
  bool trim(std::chrono::steady_clock::duration idle);
  // This worker begins to leave: no more events, and what lost workers have
  // left here is not released any more.
  void leave();
  // Closes all connections. No method of the handler runs after it returns.
  void stop();

  void addTo(Metrics& metrics) const;

 private:
  void heardOf(const transport::ConnectionPtr& connection);
  // Releases what a lost worker has left here in that life: its autograd
  // contexts (pytorch issue 26379) and, if it died, its RRefs.
  void release(const Membership::MemberPtr& worker, bool died);

  const WorkerInfo self_;
  const bool isStatic_;
  base::TaskRunner& runner_;
  const Listeners listeners_;
  std::atomic<bool> left_{false};
  Membership membership_;
  const std::shared_ptr<transport::Context> remote_;
  const std::shared_ptr<transport::Context> loopback_;
  Peers peers_; // after the members that it refers to
  WorkerEvents events_;
  Barrier barrier_;
};

} // namespace torch_rpc_ext::agent
