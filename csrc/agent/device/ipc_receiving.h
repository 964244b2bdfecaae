#pragma once

#include "agent/device/ipc_wire.h"
#include "agent/device/way.h"
#include "cuda/ipc_import.h"
#include "transport/transport.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_rpc_ext::agent::device {

class Ipc;
struct IpcPeer;

// Copies the tensors of one message from the devices of the worker that sent
// it. The destructor, which runs after the copies or when the message is
// dropped, tells the sender to release the tensors.
//
// Owns: nothing. While copies run, a callback of the EventWaiter owns this
//   object and the mappings that are copied from.
class IpcReceiving final : public ReceivingWay,
                           public std::enable_shared_from_this<IpcReceiving> {
 public:
  IpcReceiving(
      std::shared_ptr<Ipc> ipc,
      transport::ConnectionPtr connection,
      IpcPeer peer,
      uint64_t token);
  ~IpcReceiving() override;

  base::Result<Arrived> arrive(
      const MessageKey& key,
      base::ConstSpan note,
      const std::vector<Expected>& expected) override;

 private:
  using MappingPtr = std::shared_ptr<const cuda::Mapping>;
  class Copies;
  class RunSums;

  base::Result<Arrived> copyAll(
      const IpcNote& note,
      const std::vector<Expected>& expected,
      Copies& copies);
  base::Error copyRun(
      const IpcNote& note,
      size_t number,
      const std::vector<Expected>& expected,
      Copies& copies,
      RunSums& sums,
      Arrived& arrived);
  base::Result<MappingPtr>
  open(uint8_t device, const cuda::MemoryExport& memory, Copies& copies);
  base::Error openAll(const IpcNote& note, Copies& copies);

  const std::shared_ptr<Ipc> ipc_;
  const transport::ConnectionPtr connection_;
  const std::unique_ptr<const IpcPeer> peer_;
  const uint64_t token_;
};

} // namespace torch_rpc_ext::agent::device
