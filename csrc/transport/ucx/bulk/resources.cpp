#include "transport/ucx/bulk/resources.h"

#include "base/boundary.h"

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
  const auto state = state_.lock();
  try {
    return make(*state, kind);
  } catch (...) { // for example, no descriptor is left
    return base::caught();
  }
}

base::Result<std::shared_ptr<Channel>> Resources::make(
    State& state,
    ChannelKind kind) {
  const bool byLanes = kind == ChannelKind::kLanes;
  const bool made =
      byLanes ? state.laneChannel != nullptr : state.ucxChannel != nullptr;
  if (!made && state.closed) {
    return transportEnded();
  }
  if (byLanes) {
    if (!made) {
      state.laneChannel = std::make_shared<LaneChannel>(laneOptions_, gate_);
    }
    return std::shared_ptr<Channel>(state.laneChannel);
  }
  if (!made) {
    auto worker = state.makeWorker();
    if (!worker.ok()) {
      return worker.error();
    }
    state.ucxChannel =
        std::make_shared<UcxChannel>(std::move(worker.value()), *poller_);
    workerAdded_();
  }
  return std::shared_ptr<Channel>(state.ucxChannel);
}

void Resources::progressSoon() {
  const auto state = state_.lock();
  if (state->ucxChannel != nullptr) {
    state->ucxChannel->progressSoon();
  }
}

void Resources::close() {
  state_.lock()->closed = true;
}

void Resources::stop() {
  auto state = state_.lock();
  const auto lanes = state->laneChannel;
  const auto ucx = state->ucxChannel;
  state.unlock();
  if (lanes != nullptr) {
    lanes->stop();
  }
  if (ucx != nullptr) {
    ucx->stop();
  }
}

} // namespace torch_rpc_ext::transport::ucx::bulk
