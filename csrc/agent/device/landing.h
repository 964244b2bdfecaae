#pragma once

#include "agent/device/streams.h"
#include "base/buffer.h"
#include "base/synchronized.h"

#include <c10/core/Storage.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

namespace torch_rpc_ext::agent::device {

// Copies the bulk of one message from pinned memory to devices, each part as it
// arrives, while the rest is still on its way.
//
// Owns: the memory on the devices, until take().
// Thread: any. But all add() must come first, on one thread.
class Landing {
 public:
  // Copies are queued on `streams`. `count` is the number of Landings that
  // live.
  Landing(Streams streams, std::shared_ptr<std::atomic<int>> count);
  ~Landing();
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  // The bytes that arrive in `host` are for `device`. Does nothing if the
  // device has no memory for them: take() then returns an empty storage.
  void add(const c10::Storage& host, c10::Device device);
  bool empty() const {
    return places_.lock()->empty();
  }

  // A part of a `host` has arrived.
  void arrived(base::MutableSpan part);

  // To be called when all of `host` has arrived: queues what is left to copy,
  // and returns the storage on the device, for use on the streams. Empty if the
  // device had no memory, or a copy failed. May throw c10::Error.
  c10::Storage take(const c10::Storage& host);

 private:
  struct Place {
    c10::Storage host;
    c10::Storage onDevice; // empty once taken, or when a copy failed
    std::map<size_t, size_t> copied; // begin -> end
  };

  const Streams streams_;
  const std::shared_ptr<std::atomic<int>> count_;
  base::Synchronized<std::vector<Place>> places_;
};

} // namespace torch_rpc_ext::agent::device
