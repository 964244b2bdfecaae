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

// The workers of the group: who is there, how to reach each, and what follows
// when one is lost, leaves, or is started again.
//
// Owns: the members, the transports and the connections, the events, and which
//   workers the end of the group waits for (Barrier).
// Thread: any.
// Outlives: the transports' callbacks; stop() ends them.
class Group {
 public:
  using WorkerInfo = Membership::WorkerInfo;
  using worker_id_t = Membership::worker_id_t;

  // Who has to hear of what happens to the others. Called without locks.
  struct Listeners {
    // A connection has ended, and with it all that was under way there. Before
    // anybody hears that its worker is gone.
    std::function<void(const transport::ConnectionPtr&, const base::Error&)>
        ended;
    // A worker cannot be reached any more. If it has `exited`, it does not read
    // from the devices here any more either.
    std::function<void(const std::string& worker, bool exited)> gone;
    // Lets go of values that may be Python's.
    std::function<void(RRefs)> dropValues;
  };

  // `runner` outlives it.
  Group(
      const WorkerInfo& self,
      bool isStatic,
      std::shared_ptr<transport::Context> remote,
      std::shared_ptr<transport::Context> loopback,
      base::TaskRunner& runner,
      Listeners listeners);

  // Frames come to `handler` from here on, and what it hears of connections it
  // passes on to the four functions of the same names here.
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
  // What other members need to reach it.
  std::string address() const;
  bool isStatic() const {
    return isStatic_;
  }

  // What all members share, before the first connection: the group's id, and
  // the secret that lets them in. The members are added after it.
  void setSecret(const std::string& id, const std::string& secret);
  // Adds a member, or puts it in the place of its former life, which is dead.
  void add(
      const std::string& name,
      worker_id_t id,
      std::string address,
      uint32_t life);
  void remove(const std::string& name);

  // Connects to a worker, so that its death is noticed.
  void watch(worker_id_t id);
  // False once it has been noticed that a worker is gone. Throws for one that
  // is not in the group.
  bool isAlive(const std::string& worker);
  // An error if the RRef's owner has died since it was made; none if it has
  // not been started again, when its calls fail by themselves.
  base::Error ownerDied(
      const torch::distributed::rpc::RRefId& rref,
      worker_id_t owner) const;
  // For messages about an RRef that the callee's former life owned.
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

  // Gives memory of the transport back; see transport::Context.
  bool trim(std::chrono::steady_clock::duration idle);
  // The beginning of the end: no more events, and nothing is released.
  void leave();
  // Closes all connections. The Handler hears nothing after it.
  void stop();

  void addTo(Metrics& metrics) const;

 private:
  void heardOf(const transport::ConnectionPtr& connection);
  // What a worker that is lost has begun and held here in that life: autograd
  // contexts (pytorch issue 26379), and RRefs if it is dead.
  void release(const Membership::MemberPtr& worker, bool died);

  const WorkerInfo self_;
  const bool isStatic_;
  base::TaskRunner& runner_;
  const Listeners listeners_;
  std::atomic<bool> left_{false};
  Membership membership_;
  const std::shared_ptr<transport::Context> remote_;
  const std::shared_ptr<transport::Context> loopback_;
  Peers peers_; // after what it refers to
  WorkerEvents events_;
  Barrier barrier_;
};

} // namespace torch_rpc_ext::agent
