#pragma once

#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/plan.h"

#include <memory>
#include <mutex>
#include <vector>

namespace torch_rpc_ext::cuda {

// Places for the tables of segments: a table is written to pinned memory and
// copied to the device by the stream that reads it, so that nobody waits. A
// place is used again once the device has passed its event.
// Owns: the places.
// Thread: any.
class TableRing {
 public:
  static constexpr size_t kRows = 2048; // of one table, at most

  struct Place {
    int device = 0;
    SegmentRow* rows = nullptr; // pinned memory
    Address table = 0; // on the device
    EventHandle event = nullptr;
  };

  explicit TableRing(std::shared_ptr<Driver> driver);
  ~TableRing();

  // A place that nobody uses. The device's context is current.
  base::Result<Place> take(int device);

  // Queues the copy of `rows` rows.
  base::Error upload(const Place& place, size_t rows, StreamHandle stream);

  // Once the kernel that reads it is queued: the place is free when the device
  // is there.
  void giveBack(const Place& place, StreamHandle stream);

 private:
  base::Result<Place> create(int device);
  void destroy(const Place& place);

  const std::shared_ptr<Driver> driver_;
  std::mutex mutex_;
  std::vector<Place> places_; // those that no caller holds; the device may
};

} // namespace torch_rpc_ext::cuda
