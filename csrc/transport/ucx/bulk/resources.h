#pragma once

#include "base/error.h"
#include "base/gate.h"
#include "base/poller.h"
#include "base/task.h"
#include "transport/ucx/bulk/channel.h"
#include "transport/ucx/bulk/shared_maps.h"
#include "transport/ucx/ucp_context.h"
#include "transport/ucx/worker.h"

#include <functional>
#include <memory>
#include <mutex>

namespace torch_rpc_ext::transport::ucx::bulk {

// What the bulk of all connections of a UcxContext shares.
//
// Owns: the maps of peers' memory; the UCX worker for bulk and its Channel.
// Thread: any.
// Outlives: nothing; the poller and the runner outlive it.
class Resources {
 public:
  // The channel is made at its first use, because most groups never need it.
  // Only if the ports are limited, its worker is made before, and passed here.
  Resources(
      std::shared_ptr<UcpContext> ucp,
      std::shared_ptr<base::Gate> gate,
      std::shared_ptr<BulkWorker> worker)
      : ucp_(std::move(ucp)),
        gate_(std::move(gate)),
        worker_(std::move(worker)) {}

  // `workerAdded` runs when the channel has been made.
  void start(
      base::Poller& poller,
      base::TaskRunner& runner,
      std::function<void()> workerAdded);

  base::TaskRunner& runner() const {
    return *runner_;
  }
  SharedMaps& maps() {
    return maps_;
  }
  base::Result<std::shared_ptr<Channel>> channel();
  void progressSoon();

  // No channel is made any more.
  void close();
  // Stops the channel, if there is one. To be called after close().
  void stop();

 private:
  const std::shared_ptr<UcpContext> ucp_;
  const std::shared_ptr<base::Gate> gate_;
  SharedMaps maps_;
  base::Poller* poller_ = nullptr;
  base::TaskRunner* runner_ = nullptr;
  std::function<void()> workerAdded_;

  std::mutex mutex_;
  std::shared_ptr<BulkWorker> worker_; // until channel_ has it
  std::shared_ptr<Channel> channel_;
  bool closed_ = false;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
