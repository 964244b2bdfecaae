#include "agent/device/ipc_parcels.h"

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::agent::device {

namespace {

constexpr auto kInterruptInterval = std::chrono::milliseconds(100);

} // namespace

class IpcParcels::Ticket final : public Parcel {
 public:
  Ticket(
      std::shared_ptr<IpcParcels> parcels,
      uint64_t token,
      std::string receiver)
      : parcels_(std::move(parcels)),
        token_(token),
        receiver_(std::move(receiver)) {}

  ~Ticket() override {
    if (!mayBeThere_) {
      parcels_->release(token_, receiver_);
    }
  }

  void sent(const base::Error& error) override {
    // A connection that broke may have delivered the frame before.
    mayBeThere_ = !error || error.kind == base::ErrorKind::kPeerLost;
  }

 private:
  const std::shared_ptr<IpcParcels> parcels_;
  const uint64_t token_;
  const std::string receiver_;
  bool mayBeThere_ = false;
};

uint64_t IpcParcels::newToken() {
  return ++state_.lock()->lastToken;
}

std::shared_ptr<Parcel> IpcParcels::hold(
    uint64_t token,
    const std::string& receiver,
    std::vector<c10::Storage> storages) {
  state_.lock()->held[token] = {
      receiver, /*isAwaited=*/true, std::move(storages)};
  return std::make_shared<Ticket>(shared_from_this(), token, receiver);
}

void IpcParcels::release(uint64_t token, const std::string& receiver) {
  Held freed; // destroyed after the lock is released
  auto state = state_.lock();
  const auto found = state->held.find(token);
  if (found != state->held.end() && found->second.receiver == receiver) {
    freed = std::move(found->second);
    state->held.erase(found);
    released_.notify_all();
  }
}

void IpcParcels::releaseAll(const std::string& receiver) {
  std::vector<Held> freed;
  auto state = state_.lock();
  for (auto one = state->held.begin(); one != state->held.end();) {
    if (one->second.receiver == receiver) {
      freed.push_back(std::move(one->second));
      one = state->held.erase(one);
    } else {
      ++one;
    }
  }
  released_.notify_all();
}

void IpcParcels::abandon(const std::string& receiver) {
  auto state = state_.lock();
  for (auto& [_, held] : state->held) {
    held.isAwaited &= held.receiver != receiver;
  }
  released_.notify_all();
}

size_t IpcParcels::awaited(const State& state) {
  return static_cast<size_t>(
      std::count_if(state.held.begin(), state.held.end(), [](const auto& one) {
        return one.second.isAwaited;
      }));
}

size_t IpcParcels::awaited() const {
  return awaited(*state_.lock());
}

size_t IpcParcels::held() const {
  return state_.lock()->held.size();
}

bool IpcParcels::waitUntilReleased(
    std::chrono::steady_clock::time_point deadline,
    const std::function<void()>& between) {
  while (awaited() != 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    auto state = state_.lock();
    state.waitFor(
        released_, kInterruptInterval, [&] { return awaited(*state) == 0; });
    state.unlock();
    between();
  }
  return true;
}

} // namespace torch_rpc_ext::agent::device
