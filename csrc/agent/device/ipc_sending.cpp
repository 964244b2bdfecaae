#include "agent/device/ipc_sending.h"

#include "agent/device/gather.h"
#include "agent/device/staging.h"
#include "base/log.h"

#include <map>
#include <utility>

namespace torch_rpc_ext::agent::device {

using base::Error;

bool IpcSending::takes(const Departing& departing) const {
  // A storage without a context (from_blob() without a deleter) refers to
  // memory that the memory's owner may free right after the call, so the
  // storage cannot be held until the peer has copied.
  return departing.entry->place != wire::kHostPlace &&
      !departing.isReadOnHost && departing.bytes != 0 &&
      departing.storage.data_ptr().get_context() != nullptr &&
      devices_.contains(departing.device().index());
}

void IpcSending::logOnce(const Error& error) {
  if (!logged_.exchange(true)) {
    base::log(
        base::LogLevel::kInfo,
        "some CUDA tensors for worker \"" + receiver_ +
            "\" are staged through the host: " + error.message);
  }
}

std::optional<cuda::MemoryExport> IpcSending::exported(const Region& region) {
  auto memory = driver_->exporter.exportMemory(
      region.device().index(), region.address(), region.bytes);
  if (!memory.ok()) {
    logOnce(memory.error());
    return std::nullopt;
  }
  return memory.value();
}

void IpcSending::addAlone(
    const Storages& storages,
    size_t index,
    std::vector<Run>& runs) {
  const Departing& departing = storages[index];
  if (departing.scattered != nullptr ||
      departing.entry->dtype != wire::WireDtype::kFloat32) {
    addBlock(storages, {index}, runs);
  } else if (auto memory = exported(departing)) {
    runs.push_back({{index}, departing, *memory});
  }
}

void IpcSending::addBlock(
    const Storages& storages,
    const std::vector<size_t>& members,
    std::vector<Run>& runs) {
  std::vector<Slice> slices;
  size_t end = 0;
  for (const size_t index : members) {
    const Departing& departing = storages[index];
    slices.push_back({departing, cuda::aligned(end), departing.entry->dtype});
    end = slices.back().offset + slices.back().size();
  }
  const c10::Device device = slices.front().device();
  c10::Storage block = allocate(device, end);
  const auto memory = exported(block);
  if (!memory) {
    return;
  }
  gather(slices, block, launcher_);
  // The caller may free the slices' storages before the gather is over.
  for (const Slice& slice : slices) {
    keepFor(slice.storage, device);
  }
  runs.push_back({members, std::move(block), *memory});
}

std::vector<IpcSending::Run> IpcSending::makeRuns(const Storages& storages) {
  std::vector<Run> runs;
  // By device of this worker and place at the receiver.
  std::map<std::pair<int, wire::DevicePlace>, std::vector<size_t>> small;
  for (size_t i = 0; i < storages.size(); ++i) {
    const Departing& departing = storages[i];
    if (!takes(departing)) {
      continue;
    }
    if (departing.entry->bulk) {
      addAlone(storages, i, runs);
    } else {
      small[{departing.device().index(), departing.entry->place}].push_back(i);
    }
  }
  for (const auto& [_, members] : small) {
    if (members.size() >= kMinGathered) {
      addBlock(storages, members, runs);
      continue;
    }
    for (const size_t index : members) {
      addAlone(storages, index, runs);
    }
  }
  return runs;
}

// Queues the checksums of all runs on their devices, where kernels can be
// launched.
void IpcSending::addSums(
    std::vector<Run>& runs,
    std::vector<c10::Storage>& held) {
  std::map<int, c10::Storage> blocks;
  for (size_t i = 0; i < runs.size(); ++i) {
    Run& run = runs[i];
    const c10::Device device = run.region.device();
    if (!launcher_->hasChecksum(device)) {
      continue;
    }
    c10::Storage& block = blocks[device.index()];
    if (!block) {
      block = allocate(device, runs.size() * sizeof(uint64_t));
      held.push_back(block);
    }
    const Region place(block, i * sizeof(uint64_t), sizeof(uint64_t));
    if (launcher_->checksum(run.region, place.address())) {
      run.sum = exported(place);
    }
  }
}

Error IpcSending::depart(
    const MessageKey& /*key*/,
    const DepartOptions& options,
    Storages& storages,
    Departure& departure) {
  std::vector<Run> runs = makeRuns(storages);
  if (runs.empty()) {
    return {};
  }
  IpcNote note;
  std::vector<c10::Storage> held;
  if (options.checked) {
    addSums(runs, held);
  }
  std::vector<bool> isTaken(storages.size());
  for (const Run& run : runs) {
    for (const size_t index : run.members) {
      isTaken[index] = true;
    }
  }
  // Each storage's number among the storages beside the frame.
  std::vector<uint32_t> numbers(storages.size());
  uint32_t next = 0;
  uint64_t bytes = 0;
  for (size_t i = 0; i < storages.size(); ++i) {
    if (isTaken[i]) {
      storages[i].entry->beside = true;
      storages[i].entry->bulk = false;
      numbers[i] = next++;
      bytes += storages[i].entry->bytes.size;
    }
  }
  for (const Run& run : runs) {
    auto& written = note.runs.emplace_back();
    written.device = static_cast<uint8_t>(run.region.device().index());
    written.memory = run.memory;
    written.sum = run.sum;
    for (const size_t index : run.members) {
      written.storages.push_back(numbers[index]);
    }
    held.push_back(run.region.storage);
  }
  note.token = parcels_->newToken();
  // The peer cannot wait for the devices of this process: a stream that waits
  // for the event of a process that dies waits for ever.
  departure.waits = true;
  departure.note = note.write();
  departure.parcel = parcels_->hold(note.token, receiver_, std::move(held));
  bytesSent_->fetch_add(bytes, std::memory_order_relaxed);
  return {};
}

} // namespace torch_rpc_ext::agent::device
