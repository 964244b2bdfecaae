#include "transport/ucx/protocol.h"

#include "base/bytes.h"

#include <algorithm>
#include <random>

namespace torch_rpc_ext::transport::ucx {

namespace {

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
      static_cast<const char*>(data.data), std::min<size_t>(data.size, 512)};
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
  return header;
}

base::Buffer encode(const Preamble& preamble) {
  base::Buffer buffer(
      5 * 8 + 4 + 1 + 4 * 4 + preamble.challenge.size() +
      preamble.keyShare.size() + preamble.address.size() +
      preamble.hello.size());
  base::ByteWriter writer(buffer);
  writer.u64(preamble.token);
  writer.u64(preamble.process.bootId);
  writer.u64(preamble.process.pidNamespace);
  writer.u64(preamble.process.nonceAddress);
  writer.u64(preamble.process.nonce);
  writer.u32(static_cast<uint32_t>(preamble.process.pid));
  writer.u8(static_cast<uint8_t>(preamble.encryption));
  putText(writer, preamble.challenge);
  putText(writer, preamble.keyShare);
  putText(writer, preamble.address);
  putText(writer, preamble.hello);
  return buffer;
}

base::Result<Preamble> parsePreamble(base::ConstSpan bytes) {
  base::ByteReader reader(bytes);
  Preamble preamble;
  preamble.token = reader.u64();
  preamble.process.bootId = reader.u64();
  preamble.process.pidNamespace = reader.u64();
  preamble.process.nonceAddress = reader.u64();
  preamble.process.nonce = reader.u64();
  preamble.process.pid = static_cast<int32_t>(reader.u32());
  const uint8_t encryption = reader.u8();
  preamble.challenge = takeText(reader, kChallengeBytes);
  preamble.keyShare = takeText(reader, kKeyShareBytes);
  preamble.address = takeText(reader, kMaxAddressBytes);
  preamble.hello = takeText(reader, kMaxHelloBytes);
  if (reader.failed() || reader.remaining() != 0 || preamble.token == 0 ||
      preamble.address.empty() ||
      encryption > static_cast<uint8_t>(Encryption::kOn)) {
    return malformed("introduction of a peer");
  }
  preamble.encryption = static_cast<Encryption>(encryption);
  return preamble;
}

base::Buffer encode(const PullRequest& request) {
  base::Buffer buffer(4 + 4 + 8 + 4 + request.bulkAddress.size());
  base::ByteWriter writer(buffer);
  writer.u32(request.firstSpan);
  writer.u32(request.spanCount);
  writer.u64(request.tag);
  putText(writer, request.bulkAddress);
  return buffer;
}

base::Result<PullRequest> parsePullRequest(base::ConstSpan bytes) {
  base::ByteReader reader(bytes);
  PullRequest request;
  request.firstSpan = reader.u32();
  request.spanCount = reader.u32();
  request.tag = reader.u64();
  request.bulkAddress = takeText(reader, kMaxAddressBytes);
  if (reader.failed() || reader.remaining() != 0 ||
      request.bulkAddress.empty()) {
    return malformed("request for bulk");
  }
  return request;
}

base::Result<std::vector<BulkEntry>> parseBulkEntries(
    base::ConstSpan bytes,
    uint32_t count) {
  // Checked before anything is allocated: a peer may claim any count.
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

std::string encodeAddress(uint64_t token, const std::string& worker) {
  base::Buffer buffer(8 + worker.size());
  base::ByteWriter writer(buffer);
  writer.u64(token);
  writer.bytes({worker.data(), worker.size()});
  return {reinterpret_cast<const char*>(buffer.data()), buffer.size()};
}

base::Result<std::pair<uint64_t, std::string>> parseAddress(
    const std::string& address) {
  base::ByteReader reader({address.data(), address.size()});
  const uint64_t token = reader.u64();
  const base::ConstSpan worker = reader.bytes(reader.remaining());
  if (reader.failed() || worker.size == 0) {
    return malformed("worker address");
  }
  return std::pair<uint64_t, std::string>(
      token, std::string(static_cast<const char*>(worker.data), worker.size));
}

} // namespace torch_rpc_ext::transport::ucx
