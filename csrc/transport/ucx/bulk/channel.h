#pragma once

#include "transport/transport.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

// Moves bulk between hosts (or processes that cannot read each other's memory)
// on a UCX worker of its own, so that small calls never queue behind bulk. Bulk
// travels in tagged messages of up to kChunkBytes. The receiver posts its
// receives for them before it asks the sender.
//
// Owns: the bulk worker and its endpoints, by worker address.
// Thread: any.
class Channel : public std::enable_shared_from_this<Channel> {
 public:
  // Takes a worker that has not been started.
  Channel(std::shared_ptr<BulkWorker> worker, base::Poller& poller);
  ~Channel();

  const WorkerAddress& address() const {
    return address_;
  }

  // Reserves tags for `chunks` chunks, and returns the first.
  uint64_t reserveTags(uint64_t chunks);

  // Posts receives for all chunks of `into`. Returns an id for cancel().
  // `arrived`, which may be null, is called for chunks that have arrived, in
  // any order.
  uint64_t receive(
      uint64_t tag,
      std::vector<base::MutableSpan> into,
      Callback callback,
      Incoming::Arrived arrived);
  void cancel(uint64_t id, base::Error why);

  // Sends all chunks of `spans`; the callback fires when UCX does not read them
  // any more.
  void send(
      const std::string& peerAddress,
      uint64_t tag,
      std::vector<base::ConstSpan> spans,
      Callback callback);

  BulkWorker& worker() const { // for FromUcx
    return *worker_;
  }

  void progressSoon() {
    worker_->progressSoon();
  }

  void stop();

 private:
  // One receive() or send(), which ends when all its chunks have.
  struct Group;

  ucp_ep_h endpoint(
      BulkLocked& locked,
      const std::string& peerAddress,
      base::Error& error);
  void dropEndpoint(BulkLocked& locked, ucp_ep_h ep, ucs_status_t status);
  void chunkArrived(
      BulkLocked& locked,
      Group* group,
      const ucp_tag_recv_info_t& info);
  void chunkDone(BulkLocked& locked, Group* group, ucs_status_t status);
  void chunkFailed(BulkLocked& locked, Group* group, const base::Error& error);

  const std::shared_ptr<BulkWorker> worker_;
  const WorkerAddress address_;
  std::atomic<uint64_t> nextTag_;

  std::unordered_map<std::string, ucp_ep_h> endpoints_;
  std::unordered_map<uint64_t, std::unique_ptr<Group>> groups_;
  uint64_t nextGroup_ = 1;
  bool stopped_ = false;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
