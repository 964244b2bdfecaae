#pragma once

#include "transport/transport.h"

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

namespace torch_rpc_ext::agent {

// Functions that run for callers, and what is to be done when the connection to
// the caller ends.
//
// Owns: the callbacks until they are taken.
// Thread: any.
class LostCallers {
 public:
  using Callback = std::function<void()>;

  // Keeps a callback and returns its number, which is never 0. Returns 0, and
  // does not keep it, where the connection has ended already.
  uint64_t add(const transport::ConnectionPtr& connection, Callback callback);
  // Null where it was taken already.
  Callback remove(uint64_t number);
  // Those of a connection that has ended.
  std::vector<Callback> take(const transport::Connection* connection);

 private:
  struct Entry {
    const transport::Connection* connection;
    Callback callback;
  };

  std::mutex mutex_;
  uint64_t next_ = 1;
  std::map<uint64_t, Entry> entries_;
};

} // namespace torch_rpc_ext::agent
