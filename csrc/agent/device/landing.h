#pragma once

#include "agent/device/streams.h"
#include "base/buffer.h"

#include <c10/core/Storage.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace torch_rpc_ext::agent::device {

// The bulk of one message that goes to devices: what is there, in pinned
// memory, is copied while the rest is still on its way.
//
// Owns: the memory on the devices, until take().
// Thread: any, but add(), which comes first.
class Landing {
 public:
  // Copies are queued on `streams`; `count` is one higher while it lives.
  Landing(Streams streams, std::shared_ptr<std::atomic<int>> count);
  ~Landing();
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  // `host` is for `device`. Does nothing where there is no memory for it: that
  // is for the one to say who needs it.
  void add(const c10::Storage& host, c10::Device device);
  bool empty() const {
    return places_.empty();
  }

  // A part of a `host` is there.
  void arrived(base::MutableSpan part);

  // What `host` has become on its device, for the streams, when all of it has
  // arrived; empty if there was no memory for it, or a copy failed. Queues what
  // is left to copy, and may throw c10::Error.
  c10::Storage take(const c10::Storage& host);

 private:
  struct Place {
    c10::Storage host;
    c10::Storage onDevice; // empty once taken, or when a copy failed
    std::map<size_t, size_t> copied; // begin -> end
  };

  const Streams streams_;
  const std::shared_ptr<std::atomic<int>> count_;
  std::mutex mutex_;
  std::vector<Place> places_;
};

} // namespace torch_rpc_ext::agent::device
