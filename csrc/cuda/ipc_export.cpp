#include "cuda/ipc_export.h"

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::cuda {

namespace {

// The most allocations whose handles are remembered. torch's allocator has some
// hundreds.
constexpr size_t kMaxKnown = 4096;

base::Error cannotExport(const std::string& why) {
  return {
      base::ErrorKind::kUnsupported,
      "device memory cannot be exported: " + why};
}

} // namespace

void MemoryExport::write(base::ByteWriter& writer) const {
  writer.bytes({handle.bytes.data(), handle.bytes.size()});
  writer.u64(base);
  writer.u64(size);
  writer.u64(bufferId);
  writer.u64(offset);
  writer.u64(bytes);
}

base::Result<MemoryExport> MemoryExport::read(base::ByteReader& reader) {
  MemoryExport run;
  const base::ConstSpan handle = reader.bytes(run.handle.bytes.size());
  run.base = reader.u64();
  run.size = reader.u64();
  run.bufferId = reader.u64();
  run.offset = reader.u64();
  run.bytes = reader.u64();
  if (reader.failed()) {
    return base::Error{base::ErrorKind::kInvalid, "a memory handle is cut off"};
  }
  if (run.offset > run.size || run.bytes > run.size - run.offset ||
      run.base + run.size < run.base) {
    return base::Error{
        base::ErrorKind::kInvalid,
        "a memory handle names " + std::to_string(run.bytes) + " bytes at " +
            std::to_string(run.offset) + " of an allocation of " +
            std::to_string(run.size)};
  }
  std::copy_n(
      static_cast<const std::byte*>(handle.data),
      handle.size,
      run.handle.bytes.begin());
  return run;
}

MemoryExporter::MemoryExporter(std::shared_ptr<Driver> driver)
    : driver_(std::move(driver)) {}

base::Result<MemoryExport>
MemoryExporter::exportMemory(int device, Address address, uint64_t bytes) {
  const ContextGuard guard(*driver_, device);
  if (guard.error()) {
    return guard.error();
  }
  const DriverApi& api = driver_->api();
  // Ask about the address itself: within a range of several mappings the answer
  // may differ from address to address.
  int isCapable = 1;
  const Status asked =
      api.pointerAttribute(&isCapable, kPointerIsLegacyIpcCapable, address);
  if (asked == status::kSuccess && isCapable == 0) {
    return cannotExport(
        "expandable segments, cudaMallocAsync and managed memory have no "
        "handles");
  }
  MemoryExport run;
  base::Error error = driver_->check(
      api.addressRange(&run.base, &run.size, address), "cuMemGetAddressRange");
  if (!error) {
    error = driver_->check(
        api.pointerAttribute(&run.bufferId, kPointerBufferId, address),
        "cuPointerGetAttribute");
  }
  if (error) {
    return error;
  }
  run.offset = address - run.base;
  run.bytes = bytes;
  if (run.offset > run.size || bytes > run.size - run.offset) {
    return cannotExport("it is not in one allocation");
  }
  auto handle = handleOf(run.base, run.bufferId);
  if (!handle.ok()) {
    return handle.error();
  }
  run.handle = handle.value();
  return run;
}

base::Result<IpcMemoryHandle> MemoryExporter::handleOf(
    Address base,
    uint64_t bufferId) {
  auto known = known_.lock();
  const auto found = known->find(base);
  if (found != known->end() && found->second.bufferId == bufferId) {
    return found->second.handle;
  }
  IpcMemoryHandle handle;
  const Status status = driver_->api().exportMemory(&handle, base);
  const base::Error error = driver_->check(status, "cuIpcGetMemHandle");
  if (status == status::kOutOfMemory || status == status::kDeinitialized) {
    return error; // not remembered, because the next attempt may succeed
  }
  if (known->size() >= kMaxKnown) {
    // Most entries are of memory that was freed since: torch's allocator does
    // not tell us when it frees.
    known->clear();
  }
  base::Result<IpcMemoryHandle> result(handle);
  if (error) {
    result = cannotExport(error.message);
  }
  known->insert_or_assign(base, Known{bufferId, result});
  return result;
}

} // namespace torch_rpc_ext::cuda
