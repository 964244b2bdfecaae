#include "cuda/ipc_import.h"

#include "base/log.h"

#include <iterator>

namespace torch_rpc_ext::cuda {

namespace {

// Makes the error of a handle that cannot be opened kUnsupported, because the
// bytes can take another way. Only lack of memory and the driver's shutdown
// keep their kinds.
base::Error cannotOpen(base::Error error) {
  if (error.kind != base::ErrorKind::kOverloaded &&
      error.kind != base::ErrorKind::kShutDown) {
    error.kind = base::ErrorKind::kUnsupported;
  }
  return error;
}

} // namespace

Mapping::Mapping(std::shared_ptr<Driver> driver, int device, Address address)
    : driver_(std::move(driver)), device_(device), address_(address) {}

Mapping::~Mapping() {
  const ContextGuard guard(*driver_, device_);
  const base::Error error = guard.error()
      ? guard.error()
      : driver_->check(
            driver_->api().closeMemory(address_), "cuIpcCloseMemHandle");
  if (error) {
    base::log(base::LogLevel::kDebug, error.message);
  }
}

MemoryImporter::MemoryImporter(std::shared_ptr<Driver> driver, size_t maxOpen)
    : driver_(std::move(driver)), maxOpen_(maxOpen) {}

base::Result<std::shared_ptr<const Mapping>>
MemoryImporter::open(PeerKey peer, int device, const MemoryExport& run) {
  // Held while the handle is opened, which takes some milliseconds, so that two
  // threads do not open one allocation twice.
  auto state = state_.lock();
  {
    Dropped dropped;
    if (auto mapping = find(*state, peer, run, dropped)) {
      ++state->stats.hits;
      return mapping;
    }
    makeRoom(state->entries, dropped);
    // `dropped` is unmapped here, before the new memory is mapped: the driver
    // may refuse to map an allocation at whose address it still maps an older
    // one.
  }
  const ContextGuard guard(*driver_, device);
  if (guard.error()) {
    return guard.error();
  }
  Address address = 0;
  const Status status =
      driver_->api().openMemory(&address, run.handle, kIpcLazyEnablePeerAccess);
  if (status != status::kSuccess) {
    return cannotOpen(driver_->error(status, "cuIpcOpenMemHandle"));
  }
  std::shared_ptr<const Mapping> mapping(new Mapping(driver_, device, address));
  if (auto error = check(*mapping, run)) {
    return error;
  }
  ++state->stats.opened;
  state->entries[{peer, run.base}] = {
      mapping, run.size, run.bufferId, run.handle, Clock::now()};
  return mapping;
}

base::Error MemoryImporter::check(
    const Mapping& mapping,
    const MemoryExport& run) const {
  Address begin = 0;
  size_t size = 0;
  if (auto error = driver_->check(
          driver_->api().addressRange(&begin, &size, mapping.address()),
          "cuMemGetAddressRange")) {
    return cannotOpen(std::move(error));
  }
  // A copy beyond the end of the mapping would break the context: no further
  // work on the device could succeed in this process.
  const uint64_t mapped = begin + size - mapping.address();
  if (mapped < run.size) {
    return {
        base::ErrorKind::kInvalid,
        "a memory handle claims " + std::to_string(run.size) +
            " bytes, and maps " + std::to_string(mapped)};
  }
  return {};
}

std::shared_ptr<const Mapping> MemoryImporter::find(
    State& state,
    PeerKey peer,
    const MemoryExport& run,
    Dropped& dropped) {
  // Entries of a peer do not overlap each other. So of the entries that begin
  // before run.base only the last one may overlap the run's allocation.
  Entries& entries = state.entries;
  auto entry = entries.lower_bound({peer, run.base});
  if (entry != entries.begin()) {
    const auto before = std::prev(entry);
    if (before->first.first == peer &&
        before->first.second + before->second.size > run.base) {
      entry = before;
    }
  }
  while (entry != entries.end() && entry->first.first == peer &&
         entry->first.second < run.base + run.size) {
    Entry& known = entry->second;
    if (entry->first.second == run.base && known.size == run.size &&
        known.bufferId == run.bufferId && known.handle == run.handle) {
      known.used = Clock::now();
      return known.mapping;
    }
    ++state.stats.stale;
    dropped.push_back(std::move(known.mapping));
    entry = entries.erase(entry);
  }
  return nullptr;
}

void MemoryImporter::makeRoom(Entries& entries, Dropped& dropped) const {
  while (entries.size() >= maxOpen_) {
    auto oldest = entries.end();
    for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
      const bool inUse = entry->second.mapping.use_count() > 1;
      if (!inUse &&
          (oldest == entries.end() ||
           entry->second.used < oldest->second.used)) {
        oldest = entry;
      }
    }
    if (oldest == entries.end()) {
      return; // all are in use: exceed maxOpen_ for a while
    }
    dropped.push_back(std::move(oldest->second.mapping));
    entries.erase(oldest);
  }
}

void MemoryImporter::forget(PeerKey peer) {
  Dropped dropped; // unmapped after the lock is released
  auto state = state_.lock();
  Entries& entries = state->entries;
  const auto begin = entries.lower_bound({peer, 0});
  auto entry = begin;
  for (; entry != entries.end() && entry->first.first == peer; ++entry) {
    dropped.push_back(std::move(entry->second.mapping));
  }
  entries.erase(begin, entry);
}

size_t MemoryImporter::trim(Clock::duration age) {
  Dropped dropped;
  auto state = state_.lock();
  Entries& entries = state->entries;
  const auto limit = Clock::now() - age;
  for (auto entry = entries.begin(); entry != entries.end();) {
    if (entry->second.used <= limit && entry->second.mapping.use_count() == 1) {
      dropped.push_back(std::move(entry->second.mapping));
      entry = entries.erase(entry);
    } else {
      ++entry;
    }
  }
  return dropped.size();
}

ImporterStats MemoryImporter::stats() const {
  const auto state = state_.lock();
  ImporterStats stats = state->stats;
  stats.open = state->entries.size();
  return stats;
}

} // namespace torch_rpc_ext::cuda
