#include "agent/lost_callers.h"

#include <utility>

namespace torch_rpc_ext::agent {

uint64_t LostCallers::add(
    const transport::ConnectionPtr& connection,
    Callback callback) {
  auto state = state_.lock();
  // Checked under the lock: closed() is true before the end of a connection is
  // reported, and take() follows the report. So either take() finds the entry,
  // or this sees that the connection is closed.
  if (connection->closed()) {
    return 0;
  }
  state->entries.emplace(
      state->next, Entry{connection.get(), std::move(callback)});
  return state->next++;
}

LostCallers::Callback LostCallers::remove(uint64_t number) {
  auto state = state_.lock();
  auto entry = state->entries.extract(number);
  return entry.empty() ? nullptr : std::move(entry.mapped().callback);
}

std::vector<LostCallers::Callback> LostCallers::take(
    const transport::Connection* connection) {
  auto state = state_.lock();
  std::vector<Callback> taken;
  for (auto it = state->entries.begin(); it != state->entries.end();) {
    const auto current = it++;
    if (current->second.connection == connection) {
      taken.push_back(std::move(current->second.callback));
      state->entries.erase(current);
    }
  }
  return taken;
}

} // namespace torch_rpc_ext::agent
