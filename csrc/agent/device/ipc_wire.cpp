#include "agent/device/ipc_wire.h"

#include "cuda/plan.h"
#include "wire/limits.h"

#include <algorithm>

namespace torch_rpc_ext::agent::device {

using base::ByteReader;
using base::ByteWriter;
using base::ConstSpan;
using base::Error;
using base::ErrorKind;
using base::Result;

Error invalidIpc(const std::string& text) {
  return {ErrorKind::kInvalid, "CUDA IPC: " + text};
}

namespace {

constexpr size_t kRunBytes = 1 + 4 + cuda::MemoryExport::kWireBytes + 1;
constexpr size_t kTrialBytes = 1 + 8 + cuda::MemoryExport::kWireBytes;
constexpr size_t kMaxWhyBytes = 400;

// Fails if a peer claims more things than are possible. To be called before
// memory is allocated for the things.
Error checkCount(const char* what, uint64_t count, uint64_t most) {
  if (count <= most) {
    return {};
  }
  return invalidIpc(
      std::to_string(count) + " " + what + ", and only " +
      std::to_string(most) + " are possible");
}

Error cutOff(const char* what) {
  return invalidIpc(
      std::string(what) + " is cut off, or goes on behind its end");
}

bool atEnd(const ByteReader& reader) {
  return !reader.failed() && reader.remaining() == 0;
}

std::string printable(ConstSpan bytes) {
  std::string text(static_cast<const char*>(bytes.data), bytes.size);
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

Error readSum(ByteReader& reader, IpcNote::Run& run) {
  const uint8_t hasSum = reader.u8();
  if (reader.failed() || hasSum > 1) {
    return cutOff("a note");
  }
  if (hasSum == 0) {
    return {};
  }
  auto memory = cuda::MemoryExport::read(reader);
  if (!memory.ok()) {
    return memory.error();
  }
  run.sum = memory.value();
  return run.sum->bytes == sizeof(uint64_t)
      ? Error()
      : invalidIpc(
            "a checksum of " + std::to_string(run.sum->bytes) + " bytes");
}

Result<IpcNote::Run> readRun(
    ByteReader& reader,
    std::span<const uint64_t> sizes,
    std::vector<bool>& taken) {
  IpcNote::Run run;
  run.device = reader.u8();
  const uint32_t count = reader.u32();
  auto memory = cuda::MemoryExport::read(reader);
  if (!memory.ok()) {
    return memory.error();
  }
  run.memory = memory.value();
  if (auto error = checkCount("storages of a run", count, sizes.size())) {
    return error;
  }
  // With this limit the sum of sizes below cannot overflow.
  if (auto error = checkCount(
          "bytes of a run", run.memory.bytes, wire::kMaxStorageBytes)) {
    return error;
  }
  run.storages.reserve(count);
  uint64_t end = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t storage = reader.u32();
    if (reader.failed()) {
      return cutOff("a note");
    }
    if (storage >= sizes.size() || taken[storage]) {
      return invalidIpc(
          "storage " + std::to_string(storage) + " of " +
          std::to_string(sizes.size()) + " is not there, or there twice");
    }
    taken[storage] = true;
    end = cuda::aligned(end) + sizes[storage];
    if (end > run.memory.bytes) {
      break;
    }
    run.storages.push_back(storage);
  }
  if (end != run.memory.bytes || count == 0) {
    return invalidIpc(
        "a run of " + std::to_string(run.memory.bytes) +
        " bytes for storages of " + std::to_string(end));
  }
  if (auto error = readSum(reader, run)) {
    return error;
  }
  return run;
}

} // namespace

base::Buffer IpcNote::write() const {
  size_t size = 8 + 4;
  for (const Run& run : runs) {
    size += kRunBytes + run.storages.size() * 4 +
        (run.sum ? cuda::MemoryExport::kWireBytes : 0);
  }
  base::Buffer buffer(size);
  ByteWriter writer(buffer);
  writer.u64(token);
  writer.u32(static_cast<uint32_t>(runs.size()));
  for (const Run& run : runs) {
    writer.u8(run.device);
    writer.u32(static_cast<uint32_t>(run.storages.size()));
    run.memory.write(writer);
    for (const uint32_t storage : run.storages) {
      writer.u32(storage);
    }
    writer.u8(run.sum ? 1 : 0);
    if (run.sum) {
      run.sum->write(writer);
    }
  }
  return buffer;
}

Result<IpcNote> IpcNote::read(
    ConstSpan bytes,
    std::span<const uint64_t> sizes) {
  ByteReader reader(bytes);
  IpcNote note;
  note.token = reader.u64();
  const uint32_t runs = reader.u32();
  if (reader.failed()) {
    return cutOff("a note");
  }
  if (auto error = checkCount("runs", runs, sizes.size())) {
    return error;
  }
  std::vector<bool> taken(sizes.size());
  for (uint32_t i = 0; i < runs; ++i) {
    auto run = readRun(reader, sizes, taken);
    if (!run.ok()) {
      return run.error();
    }
    note.runs.push_back(std::move(run.value()));
  }
  if (!atEnd(reader)) {
    return cutOff("a note");
  }
  if (std::find(taken.begin(), taken.end(), false) != taken.end()) {
    return invalidIpc("a storage of the frame is in no run");
  }
  return note;
}

Result<uint64_t> IpcNote::tokenOf(ConstSpan bytes) {
  ByteReader reader(bytes);
  const uint64_t token = reader.u64();
  return reader.failed() ? Result<uint64_t>(cutOff("a note")) : token;
}

std::vector<char> IpcOffer::write() const {
  std::vector<char> bytes(
      identity.wireBytes() + 4 + trials.size() * kTrialBytes);
  ByteWriter writer(base::MutableSpan{bytes.data(), bytes.size()});
  identity.write(writer);
  writer.u32(static_cast<uint32_t>(trials.size()));
  for (const Trial& trial : trials) {
    writer.u8(trial.device);
    writer.u64(trial.nonce);
    trial.memory.write(writer);
  }
  return bytes;
}

Result<IpcOffer> IpcOffer::read(ConstSpan bytes) {
  ByteReader reader(bytes);
  IpcOffer offer;
  auto identity = cuda::Identity::read(reader);
  if (!identity.ok()) {
    return identity.error();
  }
  offer.identity = std::move(identity.value());
  const uint32_t count = reader.u32();
  if (auto error = checkCount("trials", count, cuda::kMaxGpus)) {
    return error;
  }
  for (uint32_t i = 0; i < count; ++i) {
    Trial trial;
    trial.device = reader.u8();
    trial.nonce = reader.u64();
    auto memory = cuda::MemoryExport::read(reader);
    if (!memory.ok()) {
      return memory.error();
    }
    trial.memory = memory.value();
    offer.trials.push_back(trial);
  }
  if (!atEnd(reader)) {
    return cutOff("an offer");
  }
  return offer;
}

std::vector<char> IpcVerdict::write() const {
  size_t size = 4;
  for (const Device& device : devices) {
    size += 1 + 1 + 2 + std::min(device.why.size(), kMaxWhyBytes);
  }
  std::vector<char> bytes(size);
  ByteWriter writer(base::MutableSpan{bytes.data(), bytes.size()});
  writer.u32(static_cast<uint32_t>(devices.size()));
  for (const Device& device : devices) {
    const size_t length = std::min(device.why.size(), kMaxWhyBytes);
    writer.u8(device.device);
    writer.u8(static_cast<uint8_t>(device.kind));
    writer.u16(static_cast<uint16_t>(length));
    writer.bytes({device.why.data(), length});
  }
  return bytes;
}

Result<IpcVerdict> IpcVerdict::read(ConstSpan bytes) {
  ByteReader reader(bytes);
  IpcVerdict verdict;
  const uint32_t count = reader.u32();
  if (auto error = checkCount("devices", count, cuda::kMaxGpus)) {
    return error;
  }
  for (uint32_t i = 0; i < count; ++i) {
    Device device;
    device.device = reader.u8();
    const uint8_t kind = reader.u8();
    const uint16_t length = reader.u16();
    device.why = printable(reader.bytes(length));
    if (reader.failed()) {
      return cutOff("a verdict");
    }
    if (kind > static_cast<uint8_t>(Kind::kHindered) || length > kMaxWhyBytes) {
      return invalidIpc("a verdict of an unknown kind, or too long");
    }
    device.kind = static_cast<Kind>(kind);
    verdict.devices.push_back(std::move(device));
  }
  if (!atEnd(reader)) {
    return cutOff("a verdict");
  }
  return verdict;
}

std::vector<char> writeReleased(uint64_t token) {
  std::vector<char> bytes(8);
  ByteWriter writer(base::MutableSpan{bytes.data(), bytes.size()});
  writer.u64(token);
  return bytes;
}

Result<uint64_t> readReleased(ConstSpan bytes) {
  ByteReader reader(bytes);
  const uint64_t token = reader.u64();
  return atEnd(reader) ? Result<uint64_t>(token) : cutOff("a release");
}

} // namespace torch_rpc_ext::agent::device
