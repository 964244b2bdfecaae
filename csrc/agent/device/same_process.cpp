#include "agent/device/same_process.h"

#include "agent/device/gather.h"
#include "agent/device/staging.h"
#include "agent/device/tables.h"

#include <algorithm>
#include <string>

namespace torch_rpc_ext::agent::device {

struct SameProcess::Copies final : Parcel {
  std::vector<c10::Storage> storages;
  Events written;
};

base::Error SameProcess::depart(
    const MessageKey& key,
    const DepartOptions& /*options*/,
    std::vector<Departing>& storages,
    Departure& departure) {
  auto copies = std::make_shared<Copies>();
  std::vector<c10::Device> devices;
  for (Departing& departing : storages) {
    const c10::Device target = deviceAt(departing.entry->place);
    if (target.is_cpu()) {
      continue;
    }
    const size_t size = departing.bytes;
    c10::Storage copy = allocate(target, size);
    if (departing.scattered == nullptr) {
      copyBytes(copy, 0, departing.storage, departing.begin, size);
    } else if (size != 0) {
      gather({{departing}}, copy, &launcher_);
    }
    // The source may be freed before the copy has run.
    keepFor(departing.storage, departing.device());
    copies->storages.push_back(std::move(copy));
    departing.entry->beside = true;
    departing.entry->bulk = false;
    // The bytes do not travel, so they are not narrowed.
    departing.entry->dtype = wire::WireDtype::kFloat32;
    departing.entry->bytes.size = size;
    if (std::find(devices.begin(), devices.end(), target) == devices.end()) {
      devices.push_back(target);
    }
  }
  if (copies->storages.empty()) {
    return {};
  }
  Streams streams;
  for (const c10::Device& device : devices) {
    streams.push_back(currentStream(device));
  }
  copies->written = record(streams);
  auto all = copies_.lock();
  std::erase_if(*all, [](const auto& one) { return one.second.expired(); });
  (*all)[key] = copies;
  departure.parcel = std::move(copies);
  return {};
}

base::Result<Arrived> SameProcess::arrive(
    const MessageKey& key,
    base::ConstSpan /*note*/,
    const std::vector<Expected>& expected) {
  std::shared_ptr<Copies> copies;
  {
    auto all = copies_.lock();
    if (const auto found = all->find(key); found != all->end()) {
      copies = found->second.lock();
      all->erase(found);
    }
  }
  if (copies == nullptr || copies->storages.size() != expected.size()) {
    return base::Error(
        base::ErrorKind::kInvalid,
        "no tensors came beside the frame of call " +
            std::to_string(key.callId));
  }
  blockCurrent(copies->written);
  for (const c10::Storage& storage : copies->storages) {
    keepFor(storage, storage.device());
  }
  Arrived arrived;
  arrived.storages = std::move(copies->storages);
  return arrived;
}

} // namespace torch_rpc_ext::agent::device
