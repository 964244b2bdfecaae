#pragma once

#include "base/error.h"
#include "base/gate.h"
#include "base/poller.h"
#include "base/synchronized.h"
#include "base/task.h"
#include "transport/ucx/bulk/channel.h"
#include "transport/ucx/bulk/lane_channel.h"
#include "transport/ucx/bulk/shared_maps.h"
#include "transport/ucx/bulk/ucx_channel.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace torch_rpc_ext::transport::ucx::bulk {

// Returns the UCX worker for bulk; called at the worker's first use.
using MakeWorker = std::function<base::Result<std::shared_ptr<BulkWorker>>()>;

// What the bulk of all connections of a UcxContext shares.
//
// Owns: the maps of peers' memory; the channels, and the UCX worker for bulk.
// Thread: any.
// Outlives: nothing; the poller and the runner outlive it.
class Resources {
 public:
  // A channel is made at its first use, because most groups never need one.
  Resources(
      MakeWorker makeWorker,
      std::shared_ptr<base::Gate> gate,
      lanes::Options laneOptions)
      : gate_(std::move(gate)),
        laneOptions_(std::move(laneOptions)),
        state_(State{std::move(makeWorker)}) {}

  // `workerAdded` runs when the UCX worker has been started.
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
  // Throws nothing: an exception becomes the error.
  base::Result<std::shared_ptr<Channel>> channel(ChannelKind kind);
  // Reserves tags for `chunks` chunks, and returns the first. No tag is used
  // twice, on whichever channel: with encryption, the tag is also the nonce.
  uint64_t reserveTags(uint64_t chunks) {
    return nextTag_.fetch_add(std::max<uint64_t>(chunks, 1));
  }
  void progressSoon();

  // No channel is made any more.
  void close();
  // Stops the channels. To be called after close().
  void stop();

 private:
  struct State {
    MakeWorker makeWorker;
    std::shared_ptr<UcxChannel> ucxChannel = nullptr;
    std::shared_ptr<LaneChannel> laneChannel = nullptr;
    bool closed = false;
  };

  base::Result<std::shared_ptr<Channel>> make(State& state, ChannelKind kind);

  const std::shared_ptr<base::Gate> gate_;
  const lanes::Options laneOptions_;
  // Begins at random, so that a stranger who wants to fill our buffers cannot
  // guess the tags.
  std::atomic<uint64_t> nextTag_{randomToken()};
  SharedMaps maps_;
  base::Poller* poller_ = nullptr;
  base::TaskRunner* runner_ = nullptr;
  std::function<void()> workerAdded_;

  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
