#include "agent/device/ipc_parcels.h"

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::agent::device {

namespace {

constexpr auto kInterruptInterval = std::chrono::milliseconds(100);

} // namespace

class IpcParcels::Ticket final : public Parcel {
 public:
  Ticket(std::shared_ptr<IpcParcels> parcels, uint64_t token)
      : parcels_(std::move(parcels)), token_(token) {}

  ~Ticket() override {
    if (!mayBeThere_) {
      parcels_->drop(token_);
    }
  }

  void sent(const base::Error& error) override {
    // A connection that broke may have delivered the frame before.
    mayBeThere_ = !error || error.kind == base::ErrorKind::kPeerLost;
  }

 private:
  const std::shared_ptr<IpcParcels> parcels_;
  const uint64_t token_;
  bool mayBeThere_ = false;
};

uint64_t IpcParcels::newToken() {
  std::lock_guard lock(mutex_);
  return ++lastToken_;
}

std::shared_ptr<Parcel>
IpcParcels::hold(uint64_t token, const std::string& receiver, Content content) {
  {
    std::lock_guard lock(mutex_);
    held_[token] = {receiver, /*isAwaited=*/true, std::move(content)};
  }
  return std::make_shared<Ticket>(shared_from_this(), token);
}

bool IpcParcels::release(uint64_t token, const std::string& receiver) {
  Held freed; // destroyed after the lock is released
  std::lock_guard lock(mutex_);
  const auto found = held_.find(token);
  if (found == held_.end() || found->second.receiver != receiver) {
    return false;
  }
  freed = std::move(found->second);
  held_.erase(found);
  released_.notify_all();
  return true;
}

void IpcParcels::drop(uint64_t token) {
  Held freed;
  std::lock_guard lock(mutex_);
  if (const auto found = held_.find(token); found != held_.end()) {
    freed = std::move(found->second);
    held_.erase(found);
    released_.notify_all();
  }
}

void IpcParcels::releaseAll(const std::string& receiver) {
  std::vector<Held> freed;
  std::lock_guard lock(mutex_);
  for (auto one = held_.begin(); one != held_.end();) {
    if (one->second.receiver == receiver) {
      freed.push_back(std::move(one->second));
      one = held_.erase(one);
    } else {
      ++one;
    }
  }
  released_.notify_all();
}

void IpcParcels::abandon(const std::string& receiver) {
  std::lock_guard lock(mutex_);
  for (auto& [_, held] : held_) {
    held.isAwaited &= held.receiver != receiver;
  }
  released_.notify_all();
}

size_t IpcParcels::awaitedLocked() const {
  return static_cast<size_t>(
      std::count_if(held_.begin(), held_.end(), [](const auto& one) {
        return one.second.isAwaited;
      }));
}

size_t IpcParcels::awaited() const {
  std::lock_guard lock(mutex_);
  return awaitedLocked();
}

size_t IpcParcels::held() const {
  std::lock_guard lock(mutex_);
  return held_.size();
}

bool IpcParcels::waitUntilReleased(
    std::chrono::steady_clock::time_point deadline,
    const std::function<void()>& between) {
  std::unique_lock lock(mutex_);
  while (awaitedLocked() != 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    released_.wait_for(lock, kInterruptInterval);
    lock.unlock();
    between();
    lock.lock();
  }
  return true;
}

} // namespace torch_rpc_ext::agent::device
