#include "transport/ucx/bulk/resources.h"

#include <utility>

namespace torch_rpc_ext::transport::ucx::bulk {

void Resources::start(
    base::Poller& poller,
    base::TaskRunner& runner,
    std::function<void()> workerAdded) {
  poller_ = &poller;
  runner_ = &runner;
  workerAdded_ = std::move(workerAdded);
}

base::Result<std::shared_ptr<Channel>> Resources::channel(ChannelKind kind) {
  const std::lock_guard lock(mutex_);
  const bool byLanes = kind == ChannelKind::kLanes;
  const bool made = byLanes ? laneChannel_ != nullptr : ucxChannel_ != nullptr;
  if (!made && closed_) {
    return base::Error{base::ErrorKind::kShutDown, "the transport has ended"};
  }
  if (byLanes) {
    if (!made) {
      laneChannel_ = std::make_shared<LaneChannel>(laneOptions_, gate_);
    }
    return std::shared_ptr<Channel>(laneChannel_);
  }
  if (!made) {
    if (worker_ == nullptr) {
      auto created = BulkWorker::create(ucp_, gate_);
      if (!created.ok()) {
        return created.error();
      }
      worker_ = std::move(created.value());
    }
    ucxChannel_ = std::make_shared<UcxChannel>(std::move(worker_), *poller_);
    workerAdded_();
  }
  return std::shared_ptr<Channel>(ucxChannel_);
}

void Resources::progressSoon() {
  const std::lock_guard lock(mutex_);
  if (ucxChannel_ != nullptr) {
    ucxChannel_->progressSoon();
  }
}

void Resources::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

void Resources::stop() {
  std::unique_lock lock(mutex_);
  const auto lanes = laneChannel_;
  const auto ucx = ucxChannel_;
  lock.unlock();
  if (lanes != nullptr) {
    lanes->stop();
  }
  if (ucx != nullptr) {
    ucx->stop();
  }
}

} // namespace torch_rpc_ext::transport::ucx::bulk
