#pragma once

#include "transport/transport.h"
#include "transport/ucx/bulk/channel.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

// Moves bulk through UCX, on a UCX worker of its own: each chunk is a tagged
// message.
//
// Owns: the bulk worker and its endpoints, by worker address.
// Thread: any.
class UcxChannel final : public Channel,
                         public std::enable_shared_from_this<UcxChannel> {
 public:
  // Takes a worker that has not been started.
  UcxChannel(std::shared_ptr<BulkWorker> worker, base::Poller& poller);
  ~UcxChannel() override;

  base::Result<std::string> addressFor(const Peer& peer) override {
    return address_.to(peer.nearness);
  }
  uint64_t receive(
      uint64_t tag,
      std::vector<base::MutableSpan> chunks,
      Callback callback,
      Incoming::Arrived arrived) override;
  void cancel(uint64_t id, base::Error why) override;
  void send(
      const std::string& address,
      uint64_t tag,
      std::vector<base::ConstSpan> chunks,
      Callback callback) override;
  void stop() override;

  BulkWorker& worker() const { // for FromUcx
    return *worker_;
  }

  void progressSoon() {
    worker_->progressSoon();
  }

 private:
  // The chunks of one receive() or send(), which ends when all its chunks have.
  struct Batch;

  ucp_ep_h endpoint(
      BulkLocked& locked,
      const std::string& peerAddress,
      base::Error& error);
  void dropEndpoint(BulkLocked& locked, ucp_ep_h ep, ucs_status_t status);
  void chunkArrived(
      BulkLocked& locked,
      Batch* batch,
      const ucp_tag_recv_info_t& info);
  void chunkDone(BulkLocked& locked, Batch* batch, ucs_status_t status);
  void chunkFailed(BulkLocked& locked, Batch* batch, const base::Error& error);
  // Ends the peer's send of a chunk that nobody receives any more.
  void refuse(BulkLocked& locked, uint64_t tag);
  void refused(
      BulkLocked& locked,
      void* request,
      ucs_status_t status,
      const ucp_tag_recv_info_t* info);

  const std::shared_ptr<BulkWorker> worker_;
  const WorkerAddress address_;

  std::unordered_map<std::string, ucp_ep_h> endpoints_;
  std::unordered_map<uint64_t, std::unique_ptr<Batch>> batches_;
  uint64_t nextBatch_ = 1;
  std::deque<void*> refusals_; // requests of refuse(), by age
  uint64_t refusalsOver_ = 0; // how many of them have ended
  bool stopped_ = false;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
