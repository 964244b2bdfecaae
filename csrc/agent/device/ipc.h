#pragma once

#include "agent/device/event_waiter.h"
#include "agent/device/ipc_driver.h"
#include "agent/device/ipc_parcels.h"
#include "agent/device/ipc_wire.h"
#include "agent/device/launcher.h"
#include "agent/device/tables.h"
#include "agent/device/way.h"
#include "agent/peers.h"
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace torch_rpc_ext::agent::device {

// The messages of ipc_wire.h.
enum class IpcMessage : uint8_t { kOffer = 0, kVerdict, kReleased };

// Whether a worker reads from the devices here.
enum class IpcState : uint8_t {
  kUnknown, // nothing was sent to it yet
  kOffered, // it tries
  kWorks, // from some of them at least
  kStaged, // from none
};
const char* toString(IpcState state);

// What is known of another worker.
struct IpcPeer {
  std::string name;
  uint32_t life = 0;
  cuda::PeerKey key = 0;
  // What it has told of itself; null before its offer.
  std::shared_ptr<const cuda::Identity> identity;
};

// CUDA IPC with all workers of this host. Before the first tensor goes to a
// worker, that one has tried to read from the devices here; until it has said
// that it can, and where it cannot, tensors are staged.
//
//   sender                                receiver
//   kOffer: who I am, what to try   ->    compares, tries
//                                   <-    kVerdict: for each device
//   frame with a note (IpcNote)     ->    copies (IpcReceiving)
//                                   <-    kReleased: let go of it
//
// Owns: the driver, trials, what is known of peers, what peers are copying.
// Thread: any.
// Outlives: all ways that it gives; they hold it by shared_ptr. stop() detaches
//   it from the agent.
class Ipc : public std::enable_shared_from_this<Ipc> {
 public:
  // What it needs of the agent.
  struct Links {
    std::function<
        void(const transport::ConnectionPtr&, IpcMessage, std::vector<char>)>
        tell;
    // Later, on a thread that may wait some milliseconds.
    std::function<void(std::function<void()>)> run;
    EventWaiter* events = nullptr;
    Launcher* launcher = nullptr;
    // Whether RPC uses devices here. Where it does not, no context is made.
    std::function<bool()> hasDevices;
  };

  Ipc(bool isEnabled, Links links);

  // The way for tensors to a worker; null while, and where, there is none.
  std::shared_ptr<SendingWay> to(
      const transport::ConnectionPtr& connection,
      const PeerLife& peer,
      Devices devices);
  // The way for the tensors of a message with this note; null if it is none of
  // ours.
  std::shared_ptr<ReceivingWay> from(
      const transport::ConnectionPtr& connection,
      const PeerLife& peer,
      base::ConstSpan note);
  // Fails with kInvalid.
  base::Error onMessage(
      const transport::ConnectionPtr& connection,
      const PeerLife& peer,
      IpcMessage kind,
      base::ConstSpan payload);
  // The worker cannot be reached any more; if it has `ended` it does not copy
  // any more either.
  void gone(const std::string& worker, bool hasEnded);

  // Closes what has not been read from for so long, which may wait.
  void trim(std::chrono::steady_clock::duration age);
  // Waits until no worker that can be reached copies from here.
  bool waitUntilReleased(
      std::chrono::steady_clock::time_point deadline,
      const std::function<void()>& between = [] {}) {
    return parcels_->waitUntilReleased(deadline, between);
  }
  size_t awaited() const {
    return parcels_->awaited();
  }
  // Nothing is told or run after it.
  void stop() {
    stopped_.store(true);
  }

  // How tensors go to a worker, and why not better; empty if nothing is known.
  struct Description {
    std::string way;
    std::string why;
  };
  Description describe(const std::string& worker) const;
  struct Stats {
    uint64_t bytesSent = 0;
    uint64_t bytesReceived = 0;
    size_t held = 0; // messages that are being copied from here
    size_t open = 0; // allocations of others that are open here
  };
  Stats stats() const;

  // For the ways.
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
    std::set<int> works; // the devices here that it can read
    std::map<int, std::string> why; // of the others
    bool isHindered = false; // somebody could do something about it
    std::shared_ptr<SendingWay> way;
  };

  Known* find(const PeerLife& peer);
  void forgetLater(cuda::PeerKey key);
  void offer(
      const transport::ConnectionPtr& connection,
      const PeerLife& peer,
      const std::vector<int>& devices);
  IpcVerdict judge(const PeerLife& peer, const IpcOffer& offer);
  void settle(const PeerLife& peer, const IpcVerdict& verdict);
  void setState(Known& known, IpcState state);
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
  mutable std::mutex mutex_;
  cuda::PeerKey lastKey_ = 0;
  std::map<std::string, Known> known_;
};

} // namespace torch_rpc_ext::agent::device
