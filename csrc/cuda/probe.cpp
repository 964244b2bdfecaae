#include "cuda/probe.h"

#include "base/host.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::cuda {

namespace {

constexpr size_t kHeadBytes = 3 * 8 + 4 + 4;
constexpr size_t kGpuBytes = 16 + 1;
constexpr uint8_t kMigBit = 1;
// The driver allocates memory in pages of this size. Smaller allocations can
// share a page, and so an IPC handle.
constexpr size_t kTrialBytes = size_t{2} << 20;

// Copies to or from a device and waits for the copy. It uses a stream of its
// own, so that it does not wait for other work. The device's context must be
// current.
base::Error
copyNow(Driver& driver, Address destination, Address source, size_t size) {
  const DriverApi& api = driver.api();
  StreamHandle stream = nullptr;
  if (auto error = driver.check(
          api.createStream(&stream, kStreamNonBlocking), "cuStreamCreate")) {
    return error;
  }
  base::Error error = driver.check(
      api.copyAsync(destination, source, size, stream), "cuMemcpyAsync");
  if (!error) {
    error = driver.check(api.synchronizeStream(stream), "cuStreamSynchronize");
  }
  api.destroyStream(stream);
  return error;
}

} // namespace

size_t Identity::wireBytes() const {
  return kHeadBytes + std::min(gpus.size(), kMaxGpus) * kGpuBytes;
}

void Identity::write(base::ByteWriter& writer) const {
  const size_t count = std::min(gpus.size(), kMaxGpus);
  writer.u64(bootId);
  writer.u64(pidNamespace);
  writer.u64(ipcNamespace);
  writer.u32(static_cast<uint32_t>(pid));
  writer.u32(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) {
    const Gpu& gpu = gpus[i];
    writer.bytes({gpu.uuid.bytes.data(), gpu.uuid.bytes.size()});
    writer.u8(gpu.isMig ? kMigBit : 0);
  }
}

base::Result<Identity> Identity::read(base::ByteReader& reader) {
  Identity identity;
  identity.bootId = reader.u64();
  identity.pidNamespace = reader.u64();
  identity.ipcNamespace = reader.u64();
  identity.pid = static_cast<int32_t>(reader.u32());
  const uint32_t count = reader.u32();
  if (count > kMaxGpus) {
    return base::Error{
        base::ErrorKind::kInvalid,
        "a worker tells of " + std::to_string(count) + " GPUs, more than " +
            std::to_string(kMaxGpus)};
  }
  for (uint32_t i = 0; i < count; ++i) {
    const base::ConstSpan uuid = reader.bytes(sizeof(Uuid));
    const uint8_t bits = reader.u8();
    if (reader.failed()) {
      break;
    }
    Identity::Gpu gpu;
    std::copy_n(
        static_cast<const char*>(uuid.data), uuid.size, gpu.uuid.bytes.begin());
    gpu.isMig = (bits & kMigBit) != 0;
    identity.gpus.push_back(gpu);
  }
  if (reader.failed()) {
    return base::Error{
        base::ErrorKind::kInvalid, "a worker's list of GPUs is cut off"};
  }
  return identity;
}

Identity identify(const Driver& driver) {
  Identity self;
  self.bootId = base::bootId();
  self.pidNamespace = base::namespaceOf("pid");
  self.ipcNamespace = base::namespaceOf("ipc");
  self.pid = getpid();
  for (const Device& device : driver.devices()) {
    self.gpus.push_back({device.uuid, device.isMig});
  }
  return self;
}

std::optional<int> findGpu(const Identity& self, const Identity::Gpu& gpu) {
  for (size_t i = 0; i < self.gpus.size(); ++i) {
    if (self.gpus[i].uuid == gpu.uuid) {
      return static_cast<int>(i);
    }
  }
  return std::nullopt;
}

std::string
whyNoIpc(const Identity& self, const Identity& peer, size_t device) {
  if (self.bootId != peer.bootId) {
    return "another host";
  }
  if (self.pidNamespace != peer.pidNamespace) {
    return "another pid namespace (containers: share it, e.g. --pid=host)";
  }
  if (self.ipcNamespace != peer.ipcNamespace) {
    return "another ipc namespace (containers: share it, e.g. --ipc=host)";
  }
  if (self.pid == peer.pid) {
    return "the same process";
  }
  if (device >= peer.gpus.size()) {
    return "the peer has no cuda:" + std::to_string(device);
  }
  const Identity::Gpu& gpu = peer.gpus[device];
  if (gpu.isMig) {
    return "the peer's cuda:" + std::to_string(device) + " is a MIG slice";
  }
  if (!findGpu(self, gpu)) {
    return "the peer's cuda:" + std::to_string(device) +
        " cannot be seen here (CUDA_VISIBLE_DEVICES)";
  }
  return {};
}

Trial::Trial(std::shared_ptr<Driver> driver, int device, Address address)
    : driver_(std::move(driver)), device_(device), address_(address) {}

Trial::~Trial() {
  const ContextGuard guard(*driver_, device_);
  if (!guard.error()) {
    driver_->api().free(address_);
  }
}

base::Result<std::unique_ptr<Trial>> Trial::create(
    const std::shared_ptr<Driver>& driver,
    int device,
    uint64_t nonce) {
  const ContextGuard guard(*driver, device);
  if (guard.error()) {
    return guard.error();
  }
  Address address = 0;
  if (auto error = driver->check(
          driver->api().allocate(&address, kTrialBytes), "cuMemAlloc")) {
    return error;
  }
  std::unique_ptr<Trial> trial(new Trial(driver, device, address));
  if (auto error = copyNow(
          *driver, address, reinterpret_cast<Address>(&nonce), sizeof(nonce))) {
    return error;
  }
  MemoryExporter exporter(driver);
  auto exported = exporter.exportMemory(device, address, sizeof(nonce));
  if (!exported.ok()) {
    return exported.error();
  }
  trial->exported_ = exported.value();
  return trial;
}

std::string Trial::attempt(
    const std::shared_ptr<Driver>& driver,
    MemoryImporter& importer,
    PeerKey peer,
    int device,
    const MemoryExport& exported,
    uint64_t nonce) {
  if (exported.bytes < sizeof(nonce)) {
    return "the trial has no bytes";
  }
  auto mapping = importer.open(peer, device, exported);
  if (!mapping.ok()) {
    return mapping.error().message;
  }
  const ContextGuard guard(*driver, device);
  if (guard.error()) {
    return guard.error().message;
  }
  uint64_t seen = 0;
  const Address source = mapping.value()->address() + exported.offset;
  if (auto error = copyNow(
          *driver, reinterpret_cast<Address>(&seen), source, sizeof(seen))) {
    return error.message;
  }
  return seen == nonce ? "" : "the handle maps other memory";
}

} // namespace torch_rpc_ext::cuda
