#pragma once

#include "agent/device/way.h"

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <vector>

namespace torch_rpc_ext::agent::device {

// Pinned host memory, and copies between it and devices. Everything is queued
// on the current streams; all may throw c10::Error.

// Pinned memory of torch's allocator, which keeps it from its next use until
// the copies queued with it are over.
c10::Storage pinned(size_t size);

// Memory of a device, for its current stream.
c10::Storage allocate(c10::Device device, size_t size);

void copyBytes(
    const c10::Storage& to,
    size_t toOffset,
    const c10::Storage& from,
    size_t fromOffset,
    size_t size);

// Brings storages from their devices to pinned memory, which their entries
// then refer to and `held` keeps. To be read once what is queued is over.
void stage(std::vector<Departing>& storages, std::vector<c10::Storage>& held);

// A storage that has arrived on the host and goes to `device`.
struct Arriving {
  c10::Device device;
  c10::Storage host;
  bool isPinned = false; // else its bytes are copied first
};

// Returns them on their devices, in order. Those that are not pinned are not
// looked at again.
std::vector<c10::Storage> unstage(const std::vector<Arriving>& storages);

} // namespace torch_rpc_ext::agent::device
