#pragma once

#include "agent/device/event_waiter.h"
#include "agent/device/ipc_driver.h"
#include "agent/device/ipc_parcels.h"
#include "agent/device/ipc_wire.h"
#include "agent/device/launcher.h"
#include "agent/device/streams.h"
#include "agent/device/way.h"
#include "agent/peers.h"
#include "base/synchronized.h"
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace torch_rpc_ext::agent::device {

// The messages of ipc_wire.h.
enum class IpcMessage : uint8_t { kOffer = 0, kVerdict, kReleased };

// Whether another worker can read from this worker's devices.
enum class IpcState : uint8_t {
  kUnknown, // no offer was sent to that worker yet
  kOffered, // that worker is trying to read
  kWorks, // that worker can read from at least one device
  kStaged, // that worker can read from none: tensors to it are staged
};
const char* toString(IpcState state);

// What is known of another worker.
struct IpcPeer {
  std::string name;
  uint32_t life = 0;
  cuda::PeerKey key = 0;
  // From the worker's offer; null before that has come.
  std::shared_ptr<const cuda::Identity> identity;
};

// CUDA IPC with all workers of this host. The sender first invites the receiver
// to try to read from the sender's devices. Tensors are staged until the
// receiver has said that this works, and always from devices that the receiver
// cannot read.
//
//   sender                                       receiver
//   kOffer: my identity, and trials        ->    compares, tries to read
//                                          <-    kVerdict: for each device
//   a frame with a note (IpcNote)          ->    copies (IpcReceiving)
//                                          <-    kReleased: the copy is over
//
// Owns: the driver, the trials, what is known about peers, and the parcels that
//   peers are copying.
// Thread: any.
// Outlives: all ReceivingWays that it gives; they hold it by shared_ptr. stop()
//   detaches it from the agent.
class Ipc : public std::enable_shared_from_this<Ipc> {
 public:
  // What Ipc uses of the agent.
  struct Links {
    // Sends a message to a peer.
    std::function<
        void(const transport::ConnectionPtr&, IpcMessage, std::vector<char>)>
        tell;
    // Runs a task later, on a thread that may be blocked for some milliseconds.
    std::function<void(std::function<void()>)> run;
    EventWaiter* events = nullptr;
    Launcher* launcher = nullptr;
    // Whether RPC uses CUDA devices in this process. If not, Ipc must not
    // create a CUDA context.
    std::function<bool()> hasDevices;
  };

  Ipc(bool isEnabled, Links links);

  // The way for tensors to a worker; null if the worker cannot read from here,
  // or has not said yet that it can.
  std::shared_ptr<SendingWay> to(
      const transport::ConnectionPtr& connection,
      const PeerLife& peer,
      DeviceList devices);
  // The way for the tensors of a message that came with this note; null if the
  // note is not one of CUDA IPC.
  std::shared_ptr<ReceivingWay> from(
      const transport::ConnectionPtr& connection,
      const PeerLife& peer,
      base::ConstSpan note);
  // A message of CUDA IPC from a peer. Fails with kInvalid if it is malformed.
  base::Error onMessage(
      const transport::ConnectionPtr& connection,
      const PeerLife& peer,
      IpcMessage kind,
      base::ConstSpan payload);
  // The worker cannot be reached any more. `hasEnded`: its process has ended,
  // so it does not copy from here any more.
  void lost(const std::string& worker, bool hasEnded);

  // Unmaps peers' memory that was not read from for `age` or longer. May wait
  // for devices.
  void trim(std::chrono::steady_clock::duration age);
  // Waits until no reachable worker copies from here. False at the deadline.
  bool waitUntilReleased(
      std::chrono::steady_clock::time_point deadline,
      const std::function<void()>& between = [] {}) {
    return parcels_->waitUntilReleased(deadline, between);
  }
  size_t awaited() const {
    return parcels_->awaited();
  }
  // After this, Ipc sends no message. Does not wait for calls under way.
  void stop() {
    stopped_.store(true);
  }

  // Which way tensors go to a worker, and why no better way is used. Both are
  // empty for an unknown worker.
  struct Description {
    std::string way;
    std::string why;
  };
  Description describe(const std::string& worker) const;
  struct Stats {
    uint64_t bytesSent = 0;
    uint64_t bytesReceived = 0;
    size_t held = 0; // messages that peers are copying from here
    size_t open = 0; // allocations of peers that are mapped here
  };
  Stats stats() const;

  // For IpcReceiving.
  void release(const transport::ConnectionPtr& connection, uint64_t token);
  void refuse(
      const transport::ConnectionPtr& connection,
      uint8_t device,
      const std::string& why);
  std::shared_ptr<IpcDriver> driver() const {
    return loader_.loaded();
  }
  EventWaiter& events() const {
    return *links_.events;
  }
  Launcher* launcher() const {
    return links_.launcher;
  }
  void countReceived(uint64_t bytes) {
    bytesReceived_.fetch_add(bytes, std::memory_order_relaxed);
  }

 private:
  struct Known : IpcPeer {
    IpcState state = IpcState::kUnknown;
    std::weak_ptr<transport::Connection> offeredOn;
    std::set<int> works; // own devices that the peer can read from
    std::map<int, std::string> why; // own device -> why the peer cannot read it
    std::set<int> hindered; // of these, those where a user could change that
    std::shared_ptr<SendingWay> way;
  };

  struct KnownPeers {
    cuda::PeerKey lastKey = 0;
    std::map<std::string, Known> byName;
  };

  // Null if `peer` is a former life of the worker.
  Known* find(KnownPeers& peers, const PeerLife& peer);
  void forgetLater(cuda::PeerKey key);
  void offer(
      const transport::ConnectionPtr& connection,
      const PeerLife& peer,
      const std::vector<int>& devices);
  IpcVerdict judge(const PeerLife& peer, const IpcOffer& offer);
  void settle(const PeerLife& peer, const IpcVerdict& verdict);
  // No other function changes a state.
  static void setState(Known& known, IpcState state);
  void tell(
      const transport::ConnectionPtr& connection,
      IpcMessage kind,
      std::vector<char> payload);

  const bool isEnabled_;
  const Links links_;
  const std::shared_ptr<IpcParcels> parcels_;
  const std::shared_ptr<std::atomic<uint64_t>> bytesSent_;
  std::atomic<uint64_t> bytesReceived_{0};
  std::atomic<bool> stopped_{false};

  IpcLoader loader_;
  base::Synchronized<KnownPeers> peers_;
};

} // namespace torch_rpc_ext::agent::device
