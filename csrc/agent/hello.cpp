#include "agent/hello.h"

#include "base/bytes.h"

namespace torch_rpc_ext::agent {

namespace {

constexpr uint16_t kHelloVersion = 2;
constexpr size_t kMaxTextBytes = 4096;

std::string takeText(base::ByteReader& reader) {
  const uint16_t size = reader.u16();
  const base::ConstSpan bytes =
      reader.bytes(size <= kMaxTextBytes ? size : UINT64_MAX);
  return {static_cast<const char*>(bytes.data), bytes.size};
}

void putText(base::ByteWriter& writer, const std::string& text) {
  writer.u16(static_cast<uint16_t>(text.size()));
  writer.bytes({text.data(), text.size()});
}

} // namespace

std::string encode(const Hello& hello) {
  base::Buffer buffer(
      2 + 4 + 4 + 2 + hello.group.size() + 2 + hello.name.size());
  base::ByteWriter writer(buffer);
  writer.u16(kHelloVersion);
  writer.u32(static_cast<uint32_t>(hello.workerId));
  writer.u32(hello.life);
  putText(writer, hello.group);
  putText(writer, hello.name);
  return {reinterpret_cast<const char*>(buffer.data()), buffer.size()};
}

base::Result<Hello> parseHello(const std::string& bytes) {
  base::ByteReader reader({bytes.data(), bytes.size()});
  const uint16_t version = reader.u16();
  if (version != kHelloVersion) {
    return base::Error{
        base::ErrorKind::kInvalid,
        "the peer introduces itself in version " + std::to_string(version) +
            ", this worker in version " + std::to_string(kHelloVersion) +
            ": install the same torch_rpc_ext everywhere"};
  }
  Hello hello;
  hello.workerId = static_cast<int32_t>(reader.u32());
  hello.life = reader.u32();
  hello.group = takeText(reader);
  hello.name = takeText(reader);
  if (reader.failed() || reader.remaining() != 0) {
    return base::Error{
        base::ErrorKind::kInvalid, "the introduction of a peer is malformed"};
  }
  return hello;
}

} // namespace torch_rpc_ext::agent
