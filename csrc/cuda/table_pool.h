#pragma once

#include "base/error.h"
#include "base/synchronized.h"
#include "cuda/driver.h"
#include "cuda/plan.h"

#include <memory>
#include <vector>

namespace torch_rpc_ext::cuda {

// Gives out places for tables of segments. The caller writes the table to the
// place's pinned memory; the stream that runs the kernel first copies it to the
// device, so that the caller need not wait. An event marks when the kernel is
// over: from then on the place can be given out again.
// Owns: the places that no caller holds.
// Thread: any.
class TablePool {
 public:
  static constexpr size_t kRows = 2048; // in a place

  struct Place {
    int device = 0;
    SegmentRow* rows = nullptr; // pinned memory
    Address table = 0; // on the device
    EventHandle event = nullptr;
  };

  explicit TablePool(std::shared_ptr<Driver> driver);
  ~TablePool();

  // A place that neither a caller nor the device uses. The device's context
  // must be current, here and in the methods below.
  base::Result<Place> take(int device);

  // Queues the copy of the first `rows` rows to the device.
  base::Error upload(const Place& place, size_t rows, StreamHandle stream);

  // To be called once the kernel that reads the table is queued. The place can
  // be given out again when the stream has got that far.
  void giveBack(const Place& place, StreamHandle stream);

 private:
  base::Result<Place> create(int device);
  void destroy(const Place& place);

  const std::shared_ptr<Driver> driver_;
  // Given back; the device may still use them.
  base::Synchronized<std::vector<Place>> places_;
};

} // namespace torch_rpc_ext::cuda
