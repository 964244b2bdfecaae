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

// What a message with tensors of devices does differently, on its way out and
// on its way in: its bytes come from a device, or go to one, while no thread
// waits.
//
// Owns: the device maps, the kernels, CUDA IPC, and who waits for a device.
// Thread: any.
// Outlives: the ways that it gives (device/way.h), once stopped.
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

  // Makes a frame of a message with tensors of devices, for `connection`.
  // `ready` gets the frame: at once, or once the devices have copied what goes
  // into it. Not called when an error is returned.
  using Ready = std::function<void(base::Result<Encoded>)>;
  base::Error encode(
      const c10::intrusive_ptr<torch::distributed::rpc::Message>& message,
      const EncodeOptions& options,
      const device::Route& route,
      const transport::ConnectionPtr& connection,
      Ready ready);

  // What brings the tensors beside a frame with this note.
  std::shared_ptr<device::ReceivingWay> wayFrom(
      const transport::ConnectionPtr& connection,
      base::ConstSpan note);
  // Lets the bulk go on to devices while the rest of it arrives; null where
  // that is not done.
  transport::Incoming::Arrived landEarly(Arrival& arrival);
  // Makes Arrival::message, of any message. False while devices compute its
  // checksums: `again` runs when they have been compared.
  bool decode(const ArrivalPtr& arrival, std::function<void()> again);

  // A message of isIpcType().
  void serveIpc(Arrival& arrival);
  // The worker cannot be reached any more; see device::Ipc.
  void gone(const std::string& worker, bool exited) {
    ipc_->gone(worker, exited);
  }
  // How CUDA tensors go to a worker; empty before the first one.
  device::Ipc::Description describe(const std::string& worker) const {
    return ipc_->describe(worker);
  }
  // False when others still copy from here at the deadline. `between` runs now
  // and then, and may throw.
  bool waitForReaders(
      std::chrono::steady_clock::time_point deadline,
      const std::function<void()>& between) {
    return ipc_->waitUntilReleased(deadline, between);
  }
  // How many messages they still copy.
  size_t readMessages() const {
    return ipc_->awaited();
  }
  // Closes what has been idle for so long; returns whether anything is open.
  bool trim(std::chrono::steady_clock::duration idle);
  // First what waits for a device gets its end; then, those who still copy from
  // here say in a moment, `patience` at most, that they have done so. While
  // the transport still runs.
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
  // Messages that take memory of devices before they are served.
  const std::shared_ptr<std::atomic<int>> landings_ =
      std::make_shared<std::atomic<int>>(0);
  device::Launcher launcher_;
  device::SameProcess sameProcess_{launcher_};
  device::EventWaiter events_;
  const std::shared_ptr<device::Ipc> ipc_; // after what it links to
};

} // namespace torch_rpc_ext::agent
