#pragma once

#include "agent/agent_metrics.h"
#include "agent/arrival.h"
#include "agent/codec.h"
#include "agent/device/event_waiter.h"
#include "agent/device/ipc.h"
#include "agent/device/launcher.h"
#include "agent/device/same_process.h"
#include "agent/device/tables.h"
#include "agent/peers.h"
#include "agent/receive_memory.h"
#include "base/task.h"
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace torch_rpc_ext::agent {

// Encodes and decodes messages with tensors on devices: their bytes are copied
// from a device, or to one, and no thread waits for the copies.
//
// Owns: the device maps, the kernels, CUDA IPC, and the thread that waits for
//   devices (device::EventWaiter).
// Thread: any.
// Outlives: the ways that it returns (device/way.h), once stopped.
class Devices {
 public:
  // The references outlive it.
  Devices(
      bool usesCudaIpc,
      cuda::PtxSource kernels,
      base::TaskRunner& runner,
      ReceiveMemory& memory,
      const Peers& peers);

  device::Tables& tables() {
    return tables_;
  }
  const device::Tables& tables() const {
    return tables_;
  }
  const std::vector<c10::Device>& used() const {
    return tables_.devices();
  }

  // Encodes a message with tensors on devices, for `connection`. `ready` gets
  // the frame: at once, or when the devices have copied what goes into it.
  // `ready` is not called when encode() returns an error.
  using Ready = std::function<void(base::Result<Encoded>)>;
  base::Error encode(
      const c10::intrusive_ptr<torch::distributed::rpc::Message>& message,
      const EncodeOptions& options,
      const device::Route& route,
      const transport::ConnectionPtr& connection,
      Ready ready);

  // The way that brings the tensors beside a frame, to which `note` belongs.
  std::shared_ptr<device::ReceivingWay> wayFrom(
      const transport::ConnectionPtr& connection,
      base::ConstSpan note);
  // Lets parts of the bulk be copied to devices while the rest arrives. Returns
  // the function to be told of each part; null where the bulk is copied
  // afterwards.
  transport::Incoming::Arrived landEarly(Arrival& arrival);
  // Sets Arrival::message, also of a message without devices. Returns false if
  // devices still compute checksums of the message; then `again` runs when the
  // checksums have been compared.
  bool decode(const ArrivalPtr& arrival, std::function<void()> again);

  // Handles a message of isIpcType().
  void serveIpc(Arrival& arrival);
  // The worker cannot be reached any more; see device::Ipc::lost().
  void lost(const std::string& worker, bool exited) {
    ipc_->lost(worker, exited);
  }
  // How CUDA tensors travel to a worker; empty before the first CUDA tensor.
  device::Ipc::Description describe(const std::string& worker) const {
    return ipc_->describe(worker);
  }
  // Waits until no other worker copies from this worker's devices; false if
  // some still do at the deadline. `between` runs now and then, and may throw.
  bool waitForReaders(
      std::chrono::steady_clock::time_point deadline,
      const std::function<void()>& between) {
    return ipc_->waitUntilReleased(deadline, between);
  }
  // The number of messages that other workers still copy.
  size_t readMessages() const {
    return ipc_->awaited();
  }
  // Closes CUDA IPC handles that have not been used for `idle`. Returns whether
  // any was open before.
  bool trim(std::chrono::steady_clock::duration idle);
  // Ends all waits for devices, then waits, `patience` at most, until other
  // workers no longer copy from here. To be called while the transport still
  // runs, because those workers send messages when they are done.
  void stop(std::chrono::milliseconds patience);

  void addTo(Metrics& metrics) const;

 private:
  std::shared_ptr<device::SendingWay> wayTo(
      const transport::ConnectionPtr& connection);
  device::Ipc::Links ipcLinks();
  void tellOfIpc(
      const transport::ConnectionPtr& connection,
      device::IpcMessage kind,
      std::vector<char> payload);
  base::Result<c10::intrusive_ptr<torch::distributed::rpc::Message>> decodeNow(
      Arrival& arrival);

  base::TaskRunner& runner_;
  ReceiveMemory& memory_;
  const Peers& peers_;
  device::Tables tables_;
  // The number of messages that are being copied to devices while the rest of
  // their bulk arrives.
  const std::shared_ptr<std::atomic<int>> landings_ =
      std::make_shared<std::atomic<int>>(0);
  device::Launcher launcher_;
  device::SameProcess sameProcess_{launcher_};
  device::EventWaiter events_;
  const std::shared_ptr<device::Ipc> ipc_; // last: it uses the others
};

} // namespace torch_rpc_ext::agent
