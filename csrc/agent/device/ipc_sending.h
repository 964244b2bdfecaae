#pragma once

#include "agent/device/ipc_driver.h"
#include "agent/device/ipc_parcels.h"
#include "agent/device/ipc_wire.h"
#include "agent/device/launcher.h"
#include "agent/device/way.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Sends tensors to one peer by CUDA IPC: leaves them where they are, and tells
// the peer where to copy them from. Small tensors are gathered into one block,
// so that hundreds of them need one handle and one copy. If float32 is to
// travel as a narrower dtype, it is cast into a block too. Devices compute the
// checksums, into memory that the peer also reads. The frame leaves when the
// devices are done. Memory that cannot be exported is staged.
//
// Owns: nothing; the IpcParcels own what departs.
class IpcSending final : public SendingWay {
 public:
  IpcSending(
      std::shared_ptr<IpcDriver> driver,
      std::shared_ptr<IpcParcels> parcels,
      std::shared_ptr<std::atomic<uint64_t>> bytesSent,
      std::string receiver,
      std::set<int> devices,
      Launcher* launcher)
      : driver_(std::move(driver)),
        parcels_(std::move(parcels)),
        bytesSent_(std::move(bytesSent)),
        receiver_(std::move(receiver)),
        devices_(std::move(devices)),
        launcher_(launcher) {}

  base::Error depart(
      const MessageKey& key,
      const DepartOptions& options,
      std::vector<Departing>& storages,
      Departure& departure) override;

 private:
  // Storages that the peer copies together.
  struct Run {
    std::vector<size_t> members; // their indices
    // The member itself if it is alone and travels as it is, else a block.
    Region region;
    cuda::MemoryExport memory;
    std::optional<cuda::MemoryExport> sum = std::nullopt;
  };
  using Storages = std::vector<Departing>;

  bool takes(const Departing& departing) const;
  std::vector<Run> makeRuns(const Storages& storages);
  void addAlone(const Storages& storages, size_t index, std::vector<Run>& runs);
  void addBlock(
      const Storages& storages,
      const std::vector<size_t>& members,
      std::vector<Run>& runs);
  std::optional<cuda::MemoryExport> exported(const Region& region);
  void addSums(std::vector<Run>& runs, std::vector<c10::Storage>& held);
  void logOnce(const base::Error& error);

  const std::shared_ptr<IpcDriver> driver_;
  const std::shared_ptr<IpcParcels> parcels_;
  const std::shared_ptr<std::atomic<uint64_t>> bytesSent_;
  const std::string receiver_;
  const std::set<int> devices_; // from which the receiver can read
  Launcher* const launcher_; // the agent's
  std::atomic<bool> logged_{false};
};

} // namespace torch_rpc_ext::agent::device
