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

// Holds what receivers are copying out of this process by CUDA IPC, until they
// say that their copies are over, or are dead.
//
// Owns: the storages and events.
// Thread: any.
class IpcParcels : public std::enable_shared_from_this<IpcParcels> {
 public:
  struct Content {
    std::vector<c10::Storage> storages;
    std::vector<cuda::EventPool::Recorded> events;
  };

  // A number for a content that hold() will get later.
  uint64_t newToken();

  // Holds the content from now on. It is released when the returned parcel dies
  // and its frame cannot have reached the receiver.
  std::shared_ptr<Parcel>
  hold(uint64_t token, const std::string& receiver, Content content);

  // False if the receiver has no content with this token.
  bool release(uint64_t token, const std::string& receiver);
  // The receiver's process has ended: releases all its contents.
  void releaseAll(const std::string& receiver);
  // The receiver cannot be reached any more, but may still copy: keeps its
  // contents, but does not expect that they are released.
  void abandon(const std::string& receiver);

  // The number of contents that are held and not abandoned.
  size_t awaited() const;
  size_t held() const;
  // Waits until awaited() is 0. `between` runs about every 100 ms and may
  // throw. False at the deadline.
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
