#pragma once

#include "agent/device/way.h"
#include "base/synchronized.h"

#include <c10/core/Storage.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Holds what receivers are copying out of this process by CUDA IPC, until the
// receiver says that its copies are over, or has died.
//
// Owns: the storages.
// Thread: any.
class IpcParcels : public std::enable_shared_from_this<IpcParcels> {
 public:
  // A number for what hold() will get later.
  uint64_t newToken();

  // Holds the storages from now on. Releases them when the returned parcel
  // dies, if the frame cannot have reached the receiver.
  std::shared_ptr<Parcel> hold(
      uint64_t token,
      const std::string& receiver,
      std::vector<c10::Storage> storages);

  // No effect if nothing is held for the receiver with this token.
  void release(uint64_t token, const std::string& receiver);
  // The receiver's process has ended: releases all that it copies.
  void releaseAll(const std::string& receiver);
  // The receiver cannot be reached any more, but may still copy: keeps
  // its storages, but does not expect that they are released.
  void abandon(const std::string& receiver);

  // The number of messages whose storages are held and not abandoned.
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
    std::vector<c10::Storage> storages;
  };

  struct State {
    uint64_t lastToken = 0;
    std::unordered_map<uint64_t, Held> held;
  };

  static size_t awaited(const State& state);

  base::Synchronized<State> state_;
  std::condition_variable released_;
};

} // namespace torch_rpc_ext::agent::device
