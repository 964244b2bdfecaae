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

base::Result<std::shared_ptr<Channel>> Resources::channel() {
  const std::lock_guard lock(mutex_);
  if (channel_ == nullptr) {
    if (closed_) {
      return base::Error{base::ErrorKind::kShutDown, "the transport has ended"};
    }
    if (worker_ == nullptr) {
      auto created = BulkWorker::create(ucp_, gate_);
      if (!created.ok()) {
        return created.error();
      }
      worker_ = std::move(created.value());
    }
    channel_ = std::make_shared<Channel>(std::move(worker_), *poller_);
    workerAdded_();
  }
  return channel_;
}

void Resources::progressSoon() {
  const std::lock_guard lock(mutex_);
  if (channel_ != nullptr) {
    channel_->progressSoon();
  }
}

void Resources::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

void Resources::stop() {
  std::unique_lock lock(mutex_);
  const auto channel = channel_;
  lock.unlock();
  if (channel != nullptr) {
    channel->stop();
  }
}

} // namespace torch_rpc_ext::transport::ucx::bulk
