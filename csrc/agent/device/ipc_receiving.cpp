#include "agent/device/ipc_receiving.h"

#include "agent/device/gather.h"
#include "agent/device/ipc.h"
#include "agent/device/staging.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace torch_rpc_ext::agent::device {

using base::Error;
using base::ErrorKind;
using base::Result;
using MappingPtr = std::shared_ptr<const cuda::Mapping>;

namespace {

Error invalid(const std::string& text) {
  return {ErrorKind::kInvalid, "CUDA IPC: " + text};
}

cuda::Address addressOf(const c10::Storage& storage) {
  return reinterpret_cast<cuda::Address>(storage.data());
}

} // namespace

// What is being copied, and to where. When it dies, after an error too, all of
// it is held until what was queued is over.
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
        streams.push_back(impl_.getStream(target));
      }
      events_.whenComplete(
          record(streams),
          [owner = std::move(owner_),
           mappings = std::move(mappings_)](const Error&) {});
    } catch (const std::exception&) {
      // The device is lost, and nothing copies any more.
    }
  }

  // Lets the current stream of a device wait for the sender's.
  Error
  order(const IpcNote& note, const IpcPeer& peer, const c10::Device& target) {
    if (std::find(targets_.begin(), targets_.end(), target) != targets_.end()) {
      return {};
    }
    targets_.push_back(target);
    auto stream = handleOf(impl_.getStream(target));
    if (!stream.ok()) {
      return stream.error();
    }
    for (const auto& event : note.events) {
      auto gpu = gpuOf(peer, event.device);
      if (!gpu.ok()) {
        return invalid("an event of a device that is not known");
      }
      if (auto error = driver_->peerEvents.wait(
              peer.key,
              gpu.value(),
              event.handle,
              target.index(),
              stream.value())) {
        return error;
      }
    }
    return {};
  }

  Error copy(
      const c10::Storage& to,
      const MappingPtr& from,
      const cuda::MemoryExport& memory) {
    auto stream = handleOf(impl_.getStream(to.device()));
    if (!stream.ok()) {
      return stream.error();
    }
    return cuda::copyAsync(
        *driver_->driver,
        to.device().index(),
        addressOf(to),
        from->address() + memory.offset,
        memory.bytes,
        stream.value());
  }

  // The index here of a device of the peer.
  Result<int> gpuOf(const IpcPeer& peer, uint8_t device) const {
    const auto& gpus = peer.identity->gpus;
    const auto found = device < gpus.size()
        ? cuda::findGpu(driver_->identity, gpus[device])
        : std::nullopt;
    return found ? Result<int>(*found)
                 : invalid(
                       "cuda:" + std::to_string(device) + " of worker \"" +
                       peer.name + "\" cannot be seen here");
  }

  IpcDriver& driver() {
    return *driver_;
  }
  void add(MappingPtr mapping) {
    mappings_.push_back(std::move(mapping));
  }
  const MappingPtr& mapping(size_t run) const {
    return mappings_[run];
  }

 private:
  std::shared_ptr<IpcReceiving> owner_;
  const std::shared_ptr<IpcDriver> driver_;
  EventWaiter& events_;
  const c10::impl::VirtualGuardImpl impl_{kType};
  std::vector<c10::Device> targets_;
  std::vector<MappingPtr> mappings_; // one for each run
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

Error IpcReceiving::openAll(const IpcNote& note, Copies& copies) {
  for (const auto& run : note.runs) {
    auto gpu = copies.gpuOf(*peer_, run.device);
    if (!gpu.ok()) {
      return gpu.error();
    }
    auto mapping =
        copies.driver().importer.open(peer_->key, gpu.value(), run.memory);
    if (!mapping.ok()) {
      const Error& error = mapping.error();
      const std::string why = "memory of cuda:" + std::to_string(run.device) +
          " of worker \"" + peer_->name +
          "\" cannot be opened: " + error.message;
      if (error.kind != ErrorKind::kOverloaded) {
        ipc_->refuse(connection_, run.device, why);
      }
      return {error.kind, why};
    }
    copies.add(mapping.value());
  }
  return {};
}

Result<std::vector<c10::Storage>> IpcReceiving::copyAll(
    const IpcNote& note,
    const std::vector<Expected>& expected,
    Copies& copies) {
  std::vector<c10::Storage> result(expected.size());
  for (size_t i = 0; i < note.runs.size(); ++i) {
    const auto& run = note.runs[i];
    const c10::Device target = expected[run.storages.front()].device;
    if (auto error = copies.order(note, *peer_, target)) {
      return error;
    }
    c10::Storage whole = allocate(target, run.memory.bytes);
    if (auto error = copies.copy(whole, copies.mapping(i), run.memory)) {
      return error;
    }
    if (run.storages.size() == 1) {
      result[run.storages.front()] = std::move(whole);
      continue;
    }
    std::vector<Slice> slices;
    size_t end = 0;
    for (const uint32_t storage : run.storages) {
      if (expected[storage].device != target) {
        return invalid("a run for several devices");
      }
      const size_t size = expected[storage].size;
      result[storage] = allocate(target, size);
      if (size != 0) {
        slices.push_back({result[storage], aligned(end)});
      }
      end = aligned(end) + size;
    }
    if (!slices.empty()) {
      scatter(whole, slices, ipc_->launcher());
    }
  }
  return result;
}

Result<std::vector<c10::Storage>> IpcReceiving::arrive(
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
    return invalid(
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
