#include "cuda/table_pool.h"

#include <utility>

namespace torch_rpc_ext::cuda {

namespace {

constexpr size_t kPlaceBytes = TablePool::kRows * sizeof(SegmentRow);

} // namespace

TablePool::TablePool(std::shared_ptr<Driver> driver)
    : driver_(std::move(driver)) {}

TablePool::~TablePool() {
  const auto places = places_.lock();
  for (const Place& place : *places) {
    const ContextGuard guard(*driver_, place.device);
    if (!guard.error()) {
      destroy(place);
    }
  }
}

base::Result<TablePool::Place> TablePool::take(int device) {
  {
    auto places = places_.lock();
    for (auto place = places->begin(); place != places->end(); ++place) {
      if (place->device == device &&
          driver_->api().queryEvent(place->event) == status::kSuccess) {
        const Place taken = *place;
        places->erase(place);
        return taken;
      }
    }
  }
  return create(device);
}

base::Result<TablePool::Place> TablePool::create(int device) {
  const DriverApi& api = driver_->api();
  Place place;
  place.device = device;
  void* rows = nullptr;
  base::Error error = driver_->check(
      api.allocatePinned(&rows, kPlaceBytes, kHostAllocPortable),
      "cuMemHostAlloc");
  place.rows = static_cast<SegmentRow*>(rows);
  if (!error) {
    error =
        driver_->check(api.allocate(&place.table, kPlaceBytes), "cuMemAlloc");
  }
  if (!error) {
    error = driver_->check(
        api.createEvent(&place.event, kEventDisableTiming), "cuEventCreate");
  }
  if (error) {
    destroy(place);
    return error;
  }
  return place;
}

void TablePool::destroy(const Place& place) {
  const DriverApi& api = driver_->api();
  if (place.event != nullptr) {
    api.destroyEvent(place.event);
  }
  if (place.table != 0) {
    api.free(place.table);
  }
  if (place.rows != nullptr) {
    api.freePinned(place.rows);
  }
}

base::Error
TablePool::upload(const Place& place, size_t rows, StreamHandle stream) {
  return driver_->check(
      driver_->api().copyAsync(
          place.table,
          reinterpret_cast<Address>(place.rows),
          rows * sizeof(SegmentRow),
          stream),
      "the copy of a table of segments");
}

void TablePool::giveBack(const Place& place, StreamHandle stream) {
  const Status recorded = driver_->api().recordEvent(place.event, stream);
  if (recorded != status::kSuccess) {
    // Without the event it stays unknown when the device is done: the place is
    // never given out again, nor freed.
    return;
  }
  places_.lock()->push_back(place);
}

} // namespace torch_rpc_ext::cuda
