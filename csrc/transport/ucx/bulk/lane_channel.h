#pragma once

#include "transport/ucx/bulk/channel.h"
#include "transport/ucx/lanes/bulk_receiver.h"
#include "transport/ucx/lanes/bulk_sender.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

// Moves bulk over TCP connections of its own, where UCX would use TCP, too:
// UCX sends bulk as one stream, which is slower
// (docs/decisions/0030-lanes.md).
//
// Owns: the sockets.
// Thread: any.
class LaneChannel final : public Channel {
 public:
  LaneChannel(
      const lanes::Options& options,
      const std::shared_ptr<base::Gate>& gate)
      : receiver_(options, gate), sender_(options.keepaliveSeconds, gate) {}

  base::Result<std::string> addressFor(const Peer& peer) override {
    return receiver_.addressAt(peer.reachesUsAt);
  }
  uint64_t receive(
      uint64_t tag,
      std::vector<base::MutableSpan> chunks,
      Callback callback,
      Incoming::Arrived arrived) override {
    return receiver_.receive(
        tag, std::move(chunks), std::move(callback), std::move(arrived));
  }
  void cancel(uint64_t id, base::Error why) override {
    receiver_.cancel(id, why);
  }
  void send(
      const std::string& address,
      uint64_t tag,
      std::vector<base::ConstSpan> chunks,
      Callback callback) override {
    sender_.send(address, tag, std::move(chunks), std::move(callback));
  }
  void stop() override {
    receiver_.stop();
    sender_.stop();
  }

 private:
  lanes::BulkReceiver receiver_;
  lanes::BulkSender sender_;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
