#include "agent/device/ipc_receiving.h"

#include "agent/device/gather.h"
#include "agent/device/ipc.h"
#include "agent/device/staging.h"
#include "agent/device/sums.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace torch_rpc_ext::agent::device {

using base::Error;
using base::ErrorKind;
using base::Result;

namespace {

cuda::Address addressOf(const c10::Storage& storage) {
  return reinterpret_cast<cuda::Address>(storage.data());
}

} // namespace

// What is being copied, and to which devices. When it dies, also after an
// error, the EventWaiter holds the mappings until the queued copies are over.
class IpcReceiving::Copies {
 public:
  Copies(
      std::shared_ptr<IpcReceiving> owner,
      std::shared_ptr<IpcDriver> driver,
      EventWaiter& events)
      : owner_(std::move(owner)), driver_(std::move(driver)), events_(events) {}

  ~Copies() {
    if (targets_.empty()) {
      return;
    }
    try {
      Streams streams;
      for (const c10::Device& target : targets_) {
        streams.push_back(currentStream(target));
      }
      events_.whenComplete(
          record(streams),
          [owner = std::move(owner_),
           mappings = std::move(mappings_)](const Error&) {});
    } catch (const std::exception&) {
      // The device has failed, so no copy is running any more.
    }
  }

  // Copies will be queued on the current stream of this device.
  void addTarget(const c10::Device& target) {
    if (std::find(targets_.begin(), targets_.end(), target) == targets_.end()) {
      targets_.push_back(target);
    }
  }

  // Queues a copy on the current stream of `device`. `to` is on that device, or
  // in pinned memory.
  Error copy(
      const c10::Device& device,
      cuda::Address to,
      const MappingPtr& from,
      const cuda::MemoryExport& memory) {
    auto stream = currentHandle(device);
    if (!stream.ok()) {
      return stream.error();
    }
    return cuda::copyAsync(
        *driver_->driver,
        device.index(),
        to,
        from->address() + memory.offset,
        memory.bytes,
        stream.value());
  }

  // This process's index of the peer's device.
  Result<int> gpuOf(const IpcPeer& peer, uint8_t device) const {
    const auto& gpus = peer.identity->gpus;
    const auto found = device < gpus.size()
        ? cuda::findGpu(driver_->identity, gpus[device])
        : std::nullopt;
    return found ? Result<int>(*found)
                 : invalidIpc(
                       "cuda:" + std::to_string(device) + " of worker \"" +
                       peer.name + "\" cannot be seen here");
  }

  IpcDriver& driver() {
    return *driver_;
  }
  // What one run is copied from.
  struct Mappings {
    MappingPtr memory;
    MappingPtr sum; // where the checksum is; null without a checksum
  };
  void add(Mappings ofRun) {
    mappings_.push_back(std::move(ofRun));
  }
  const Mappings& mappings(size_t run) const {
    return mappings_[run];
  }

 private:
  std::shared_ptr<IpcReceiving> owner_;
  const std::shared_ptr<IpcDriver> driver_;
  EventWaiter& events_;
  std::vector<c10::Device> targets_;
  std::vector<Mappings> mappings_; // of each run
};

IpcReceiving::IpcReceiving(
    std::shared_ptr<Ipc> ipc,
    transport::ConnectionPtr connection,
    IpcPeer peer,
    uint64_t token)
    : ipc_(std::move(ipc)),
      connection_(std::move(connection)),
      peer_(std::make_unique<const IpcPeer>(std::move(peer))),
      token_(token) {}

IpcReceiving::~IpcReceiving() {
  ipc_->release(connection_, token_);
}

auto IpcReceiving::open(
    uint8_t device,
    const cuda::MemoryExport& memory,
    Copies& copies) -> Result<MappingPtr> {
  auto gpu = copies.gpuOf(*peer_, device);
  if (!gpu.ok()) {
    return gpu.error();
  }
  auto mapping = copies.driver().importer.open(peer_->key, gpu.value(), memory);
  if (!mapping.ok()) {
    const Error& error = mapping.error();
    const std::string why = "memory of cuda:" + std::to_string(device) +
        " of worker \"" + peer_->name + "\" cannot be opened: " + error.message;
    if (error.kind != ErrorKind::kOverloaded) {
      ipc_->refuse(connection_, device, why);
    }
    return Error(error.kind, why);
  }
  return MappingPtr(mapping.value());
}

Error IpcReceiving::openAll(const IpcNote& note, Copies& copies) {
  for (const auto& run : note.runs) {
    auto memory = open(run.device, run.memory, copies);
    if (!memory.ok()) {
      return memory.error();
    }
    auto sum = run.sum ? open(run.device, *run.sum, copies)
                       : Result<MappingPtr>(MappingPtr());
    if (!sum.ok()) {
      return sum.error();
    }
    copies.add({std::move(memory.value()), std::move(sum.value())});
  }
  return {};
}

// The checksums of all runs, from the sender's devices and from this process's.
// Runs for which no kernel can be launched have none.
class IpcReceiving::RunSums {
 public:
  RunSums(const IpcNote& note, Launcher* launcher)
      : most_(note.runs.size()), here_(launcher, most_), launcher_(launcher) {}

  Error add(
      const IpcNote& note,
      size_t number,
      const c10::Storage& whole,
      Copies& copies,
      Arrived& arrived) {
    const auto& run = note.runs[number];
    const c10::Device device = whole.device();
    if (!run.sum || launcher_ == nullptr || !launcher_->hasChecksum(device)) {
      return {};
    }
    if (!sent_) {
      sent_ = pinned(most_ * sizeof(uint64_t));
      arrived.held.push_back(sent_);
    }
    auto* const sent = static_cast<uint64_t*>(sent_.mutable_data()) + number;
    if (auto error = copies.copy(
            device,
            reinterpret_cast<cuda::Address>(sent),
            copies.mappings(number).sum,
            *run.sum)) {
      return error;
    }
    keepFor(sent_, device);
    if (const uint64_t* const here = here_.add(whole)) {
      arrived.sums.push_back({run.storages, run.memory.bytes, here, sent});
    }
    return {};
  }
  void finish(Arrived& arrived) const {
    arrived.held.push_back(here_.memory());
  }

 private:
  const size_t most_;
  Sums here_;
  Launcher* const launcher_;
  c10::Storage sent_; // pinned
};

Error IpcReceiving::copyRun(
    const IpcNote& note,
    size_t number,
    const std::vector<Expected>& expected,
    Copies& copies,
    RunSums& sums,
    Arrived& arrived) {
  const auto& run = note.runs[number];
  const c10::Device target = expected[run.storages.front()].device;
  copies.addTarget(target);
  c10::Storage whole = allocate(target, run.memory.bytes);
  if (auto error = copies.copy(
          target,
          addressOf(whole),
          copies.mappings(number).memory,
          run.memory)) {
    return error;
  }
  if (auto error = sums.add(note, number, whole, copies, arrived)) {
    return error;
  }
  const Expected& first = expected[run.storages.front()];
  if (run.storages.size() == 1 && first.dtype == wire::WireDtype::kFloat32) {
    arrived.storages[run.storages.front()] = std::move(whole);
    return {};
  }
  std::vector<Slice> slices;
  size_t end = 0;
  for (const uint32_t storage : run.storages) {
    const Expected& one = expected[storage];
    if (one.device != target) {
      return invalidIpc("a run for several devices");
    }
    arrived.storages[storage] = allocate(target, one.sizeHere());
    if (one.size != 0) {
      slices.push_back(
          {arrived.storages[storage], cuda::aligned(end), one.dtype});
    }
    end = cuda::aligned(end) + one.size;
  }
  if (!slices.empty()) {
    scatter(whole, slices, ipc_->launcher());
  }
  return {};
}

Result<Arrived> IpcReceiving::copyAll(
    const IpcNote& note,
    const std::vector<Expected>& expected,
    Copies& copies) {
  Arrived arrived;
  arrived.storages.resize(expected.size());
  RunSums sums(note, ipc_->launcher());
  for (size_t i = 0; i < note.runs.size(); ++i) {
    if (auto error = copyRun(note, i, expected, copies, sums, arrived)) {
      return error;
    }
  }
  sums.finish(arrived);
  return arrived;
}

Result<Arrived> IpcReceiving::arrive(
    const MessageKey& /*key*/,
    base::ConstSpan bytes,
    const std::vector<Expected>& expected) {
  std::vector<uint64_t> sizes;
  uint64_t total = 0;
  for (const Expected& one : expected) {
    sizes.push_back(one.size);
    total += one.size;
  }
  auto note = IpcNote::read(bytes, sizes);
  if (!note.ok()) {
    return note.error();
  }
  const auto driver = ipc_->driver();
  if (driver == nullptr || peer_->identity == nullptr) {
    return invalidIpc(
        "worker \"" + peer_->name +
        "\" sends tensors in this way without having offered it");
  }
  Copies copies(shared_from_this(), driver, ipc_->events());
  if (auto error = openAll(note.value(), copies)) {
    return error;
  }
  auto result = copyAll(note.value(), expected, copies);
  if (result.ok()) {
    ipc_->countReceived(total);
  }
  return result;
}

} // namespace torch_rpc_ext::agent::device
