#include "transport/ucx/protocol.h"

#include "base/bytes.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace torch_rpc_ext::transport::ucx {

namespace {

constexpr size_t kMaxReasonBytes = 512;

base::Error malformed(const char* what) {
  return {base::ErrorKind::kInvalid, std::string("malformed ") + what};
}

std::string takeText(base::ByteReader& reader, size_t limit) {
  const uint32_t size = reader.u32();
  if (size > limit) {
    reader.bytes(UINT64_MAX); // marks the reader as failed
    return {};
  }
  const base::ConstSpan bytes = reader.bytes(size);
  return {static_cast<const char*>(bytes.data), bytes.size};
}

void putText(base::ByteWriter& writer, const std::string& text) {
  writer.u32(static_cast<uint32_t>(text.size()));
  writer.bytes({text.data(), text.size()});
}

constexpr size_t kProcessBytes = 5 * 8 + 4;

void putProcess(base::ByteWriter& writer, const ProcessIdentity& process) {
  writer.u64(process.bootId);
  writer.u64(process.pidNamespace);
  writer.u64(process.nonceAddress);
  writer.u64(process.nonce);
  writer.u64(process.rights);
  writer.u32(static_cast<uint32_t>(process.pid));
}

ProcessIdentity takeProcess(base::ByteReader& reader) {
  ProcessIdentity process;
  process.bootId = reader.u64();
  process.pidNamespace = reader.u64();
  process.nonceAddress = reader.u64();
  process.nonce = reader.u64();
  process.rights = reader.u64();
  process.pid = static_cast<int32_t>(reader.u32());
  return process;
}

size_t wireBytes(const WorkerAddress& address) {
  return 2 * 4 + address.all.size() + address.network.size();
}

void putAddress(base::ByteWriter& writer, const WorkerAddress& address) {
  putText(writer, address.all);
  putText(writer, address.network);
}

WorkerAddress takeAddress(base::ByteReader& reader) {
  WorkerAddress address;
  address.all = takeText(reader, kMaxAddressBytes);
  address.network = takeText(reader, kMaxAddressBytes);
  return address;
}

} // namespace

uint64_t randomToken() {
  std::random_device source;
  uint64_t token = 0;
  while (token == 0) {
    token = (static_cast<uint64_t>(source()) << 32) | source();
  }
  return token;
}

std::string toText(base::ConstSpan data) {
  return {
      static_cast<const char*>(data.data),
      std::min(data.size, kMaxReasonBytes)};
}

base::Buffer encodeReason(const base::Error& why) {
  base::Buffer text(std::min(why.message.size(), kMaxReasonBytes));
  if (text.size() != 0) {
    std::memcpy(text.data(), why.message.data(), text.size());
  }
  return text;
}

base::Error reasonOf(const Message& message) {
  const uint32_t kind = message.header.count;
  if (kind == 0) {
    return {};
  }
  return {
      kind <= static_cast<uint32_t>(base::ErrorKind::kCorrupted)
          ? static_cast<base::ErrorKind>(kind)
          : base::ErrorKind::kRefused,
      toText(message.data)};
}

base::Result<FrameHeader> parseHeader(base::ConstSpan bytes) {
  base::ByteReader reader(bytes);
  FrameHeader header;
  header.version = reader.u16();
  const uint16_t kind = reader.u16();
  header.count = reader.u32();
  header.token = reader.u64();
  header.transfer = reader.u64();
  header.acknowledged = reader.u64();
  if (reader.failed() || reader.remaining() != 0 ||
      kind < static_cast<uint16_t>(FrameKind::kOpen) ||
      kind > static_cast<uint16_t>(FrameKind::kAbort)) {
    return malformed("frame header");
  }
  header.kind = static_cast<FrameKind>(kind);
  const bool isBig = header.kind == FrameKind::kBigFrame;
  const bool hasBulk = isBig || header.count != 0;
  if ((isBig || header.kind == FrameKind::kFrame) &&
      hasBulk != (header.transfer != 0)) {
    return malformed("frame header");
  }
  return header;
}

base::Buffer encode(const Preamble& preamble) {
  base::Buffer buffer(
      8 + kProcessBytes + 1 + 1 + 3 * 4 + preamble.challenge.size() +
      preamble.keyShare.size() + wireBytes(preamble.address) +
      preamble.hello.size());
  base::ByteWriter writer(buffer);
  writer.u64(preamble.token);
  putProcess(writer, preamble.process);
  writer.u8(preamble.sameHost ? 1 : 0);
  writer.u8(static_cast<uint8_t>(preamble.encryption));
  putText(writer, preamble.challenge);
  putText(writer, preamble.keyShare);
  putAddress(writer, preamble.address);
  putText(writer, preamble.hello);
  return buffer;
}

base::Result<Preamble> parsePreamble(base::ConstSpan bytes) {
  base::ByteReader reader(bytes);
  Preamble preamble;
  preamble.token = reader.u64();
  preamble.process = takeProcess(reader);
  const uint8_t sameHost = reader.u8();
  const uint8_t encryption = reader.u8();
  preamble.challenge = takeText(reader, kChallengeBytes);
  preamble.keyShare = takeText(reader, kKeyShareBytes);
  preamble.address = takeAddress(reader);
  preamble.hello = takeText(reader, kMaxHelloBytes);
  if (reader.failed() || reader.remaining() != 0 || preamble.token == 0 ||
      preamble.address.all.empty() || sameHost > 1 ||
      encryption > static_cast<uint8_t>(Encryption::kOn)) {
    return malformed("introduction of a peer");
  }
  preamble.sameHost = sameHost != 0;
  preamble.encryption = static_cast<Encryption>(encryption);
  return preamble;
}

base::Buffer encode(const PullRequest& request) {
  base::Buffer buffer(4 + 4 + 8 + 1 + 4 + request.bulkAddress.size());
  base::ByteWriter writer(buffer);
  writer.u32(request.firstSpan);
  writer.u32(request.spanCount);
  writer.u64(request.tag);
  writer.u8(static_cast<uint8_t>(request.channel));
  putText(writer, request.bulkAddress);
  return buffer;
}

base::Result<PullRequest> parsePullRequest(base::ConstSpan bytes) {
  base::ByteReader reader(bytes);
  PullRequest request;
  request.firstSpan = reader.u32();
  request.spanCount = reader.u32();
  request.tag = reader.u64();
  const uint8_t channel = reader.u8();
  request.bulkAddress = takeText(reader, kMaxAddressBytes);
  if (reader.failed() || reader.remaining() != 0 ||
      request.bulkAddress.empty() ||
      channel > static_cast<uint8_t>(ChannelKind::kLanes)) {
    return malformed("request for bulk");
  }
  request.channel = static_cast<ChannelKind>(channel);
  return request;
}

base::Result<std::vector<BulkEntry>> parseBulkEntries(
    base::ConstSpan bytes,
    uint32_t count) {
  // Checked before anything is allocated, because a peer may claim any count.
  if (count > kMaxBulkSpans || count > bytes.size / sizeof(BulkEntry)) {
    return malformed("table of bulk spans");
  }
  base::ByteReader reader(bytes);
  std::vector<BulkEntry> entries(count);
  for (auto& entry : entries) {
    entry.size = reader.u64();
    entry.address = reader.u64();
    entry.region = reader.u64();
    entry.fd = reader.u64();
  }
  return entries;
}

std::string encodeAddress(const ContextAddress& address) {
  base::Buffer buffer(8 + kProcessBytes + wireBytes(address.worker));
  base::ByteWriter writer(buffer);
  writer.u64(address.door);
  putProcess(writer, address.process);
  putAddress(writer, address.worker);
  return {reinterpret_cast<const char*>(buffer.data()), buffer.size()};
}

base::Result<ContextAddress> parseAddress(const std::string& bytes) {
  base::ByteReader reader({bytes.data(), bytes.size()});
  ContextAddress address;
  address.door = reader.u64();
  address.process = takeProcess(reader);
  address.worker = takeAddress(reader);
  if (reader.failed() || reader.remaining() != 0 ||
      address.worker.all.empty()) {
    return malformed("worker address");
  }
  return address;
}

} // namespace torch_rpc_ext::transport::ucx
