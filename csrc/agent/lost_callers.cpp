#include "agent/lost_callers.h"

#include <utility>

namespace torch_rpc_ext::agent {

uint64_t LostCallers::add(
    const transport::ConnectionPtr& connection,
    Callback callback) {
  std::lock_guard lock(mutex_);
  // Checked under the lock: closed() is true before the end of a connection is
  // reported, and take() follows the report. So either take() finds the entry,
  // or this sees that the connection is closed.
  if (connection->closed()) {
    return 0;
  }
  entries_.emplace(next_, Entry{connection.get(), std::move(callback)});
  return next_++;
}

LostCallers::Callback LostCallers::remove(uint64_t number) {
  std::lock_guard lock(mutex_);
  auto entry = entries_.extract(number);
  return entry.empty() ? nullptr : std::move(entry.mapped().callback);
}

std::vector<LostCallers::Callback> LostCallers::take(
    const transport::Connection* connection) {
  std::lock_guard lock(mutex_);
  std::vector<Callback> taken;
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto current = it++;
    if (current->second.connection == connection) {
      taken.push_back(std::move(current->second.callback));
      entries_.erase(current);
    }
  }
  return taken;
}

} // namespace torch_rpc_ext::agent
