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
  // `count` is one higher while it lives.
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

  // Of the streams that the copies are queued on; take() is for them.
  const Streams& streams() const {
    return streams_;
  }

  // A part of a `host` is there.
  void arrived(base::MutableSpan part);

  // What `host` has become on its device, when all of it has arrived; empty if
  // it was not added. Queues what is left to copy, and may throw c10::Error.
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
