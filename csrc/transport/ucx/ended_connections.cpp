#include "transport/ucx/ended_connections.h"

#include "transport/ucx/connection.h"

#include <algorithm>

namespace torch_rpc_ext::transport::ucx {

namespace {

constexpr size_t kMaxBroken = 1024; // more than a group has workers
constexpr size_t kMaxParked = 64; // fewer, because each has a socket

} // namespace

void EndedConnections::broke(
    Locked&,
    uint64_t localToken,
    std::shared_ptr<UcxConnection> connection) {
  if (stopped_) {
    return;
  }
  broken_.emplace_back(localToken, std::move(connection));
  if (broken_.size() > kMaxBroken) {
    broken_.pop_front();
  }
}

EndedConnections::Broken::iterator EndedConnections::find(uint64_t localToken) {
  return std::find_if(broken_.begin(), broken_.end(), [&](const auto& entry) {
    return entry.first == localToken;
  });
}

void EndedConnections::tell(Locked& locked, uint64_t localToken) {
  if (const auto it = find(localToken); it != broken_.end()) {
    it->second->tellThatItBroke(locked);
  }
}

void EndedConnections::onMessage(Locked& locked, const Message& message) {
  const auto it = find(message.header.token);
  if (it == broken_.end()) {
    return;
  }
  if (it->second->saysClosed(locked, message)) {
    broken_.erase(it);
  } else {
    it->second->tellThatItBroke(locked);
  }
}

bool EndedConnections::park(
    Locked& locked,
    std::shared_ptr<UcxConnection> connection) {
  if (stopped_) {
    return false;
  }
  parked_.push_back(std::move(connection));
  if (parked_.size() > kMaxParked) {
    unpark(locked, *parked_.front());
  }
  return true;
}

void EndedConnections::unpark(Locked& locked, const UcxConnection& connection) {
  const auto it =
      std::find_if(parked_.begin(), parked_.end(), [&](const auto& parked) {
        return parked.get() == &connection;
      });
  if (it != parked_.end()) {
    const auto parked = std::move(*it);
    parked_.erase(it);
    parked->leavePark(locked);
  }
}

void EndedConnections::keep(Locked& locked, std::shared_ptr<PeerWatch> watch) {
  std::erase_if(
      watches_, [&](const auto& former) { return !former->holds(locked); });
  watches_.push_back(std::move(watch));
}

void EndedConnections::stop(Locked& locked) {
  stopped_ = true;
  broken_.clear();
  while (!parked_.empty()) {
    unpark(locked, *parked_.front());
  }
}

void EndedConnections::unwatch(Locked& locked) {
  for (const auto& watch : watches_) {
    watch->unwatch(locked);
  }
}

} // namespace torch_rpc_ext::transport::ucx
