#pragma once

#include "agent/device/way.h"
#include "cuda/ipc_export.h"

#include <c10/core/Storage.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent::device {

// What receivers are copying out of this process by CUDA IPC: held until they
// say that they have it, or are dead.
//
// Owns: the storages and events.
// Thread: any.
class IpcParcels : public std::enable_shared_from_this<IpcParcels> {
 public:
  struct Content {
    std::vector<c10::Storage> storages;
    std::vector<cuda::EventPool::Recorded> events;
  };

  // A number for what is to be held, once it is known.
  uint64_t newToken();

  // Holds it from now on; lets go by itself when the frame cannot be sent.
  std::shared_ptr<Parcel>
  hold(uint64_t token, const std::string& receiver, Content content);

  // False for a token that is not this receiver's.
  bool release(uint64_t token, const std::string& receiver);
  // All of a receiver that is no more.
  void releaseAll(const std::string& receiver);
  // Nobody hears of this receiver any more, but it may still copy.
  void abandon(const std::string& receiver);

  // Parcels whose receivers are expected to say that they have copied them.
  size_t awaited() const;
  size_t held() const;
  // Waits for those; `between` runs every 100 ms and may throw. False at the
  // deadline.
  bool waitUntilReleased(
      std::chrono::steady_clock::time_point deadline,
      const std::function<void()>& between);

 private:
  class Ticket;
  struct Held {
    std::string receiver;
    bool isAwaited = true;
    Content content;
  };

  void drop(uint64_t token);
  size_t awaitedLocked() const;

  mutable std::mutex mutex_;
  std::condition_variable released_;
  uint64_t lastToken_ = 0;
  std::unordered_map<uint64_t, Held> held_;
};

} // namespace torch_rpc_ext::agent::device
