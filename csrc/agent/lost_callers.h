#pragma once

#include "base/synchronized.h"
#include "transport/transport.h"

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace torch_rpc_ext::agent {

// Callbacks of running functions that want to hear when the connection to their
// caller ends.
//
// Owns: the callbacks until they are taken.
// Thread: any.
class LostCallers {
 public:
  using Callback = std::function<void()>;

  // Keeps a callback and returns its number, which is never 0. Returns 0 and
  // drops the callback if the connection has already ended.
  uint64_t add(const transport::ConnectionPtr& connection, Callback callback);
  // Returns the callback; null where it was already taken.
  Callback remove(uint64_t number);
  // Takes the callbacks of a connection that has ended.
  std::vector<Callback> take(const transport::Connection* connection);

 private:
  struct Entry {
    const transport::Connection* connection;
    Callback callback;
  };
  struct State {
    uint64_t next = 1;
    std::map<uint64_t, Entry> entries;
  };

  base::Synchronized<State> state_;
};

} // namespace torch_rpc_ext::agent
