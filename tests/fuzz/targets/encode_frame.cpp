// The encoder of RPC messages. Either it refuses a message with a reason, or
// the decoder reads what it wrote as the same message.

#include "base/bytes.h"
#include "fuzz/targets/target.h"
#include "wire/call_frame.h"

#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::wire;

namespace {

// Mostly small numbers; one in eight is any number.
int64_t number(base::ByteReader& reader) {
  const uint8_t byte = reader.u8();
  return byte % 8 == 7 ? reader.i64() : byte / 8;
}

struct Message {
  CallFrame frame;
  std::vector<StorageEntry> storages;
  std::vector<TensorRecord> records;
  std::vector<Dim> dims;
  std::vector<uint64_t> sums;
};

void fill(Message& message, base::ByteReader& reader) {
  CallFrame& frame = message.frame;
  const uint8_t shape = reader.u8();
  frame.header.kind = static_cast<CallKind>(shape & 1);
  frame.header.messageType = reader.u16();
  frame.header.flags = reader.u32();
  frame.header.callId = reader.u64();
  frame.payloadBulk = (shape & 2) != 0;
  if ((shape & 8) != 0) {
    frame.header.answer = static_cast<WireDtype>((shape >> 4) % 3);
  }
  if ((shape & 128) != 0) {
    frame.header.timeout = shape;
  }
  frame.payload = frame.payloadBulk
      ? base::ConstSpan{nullptr, static_cast<size_t>(number(reader))}
      : reader.bytes(reader.u8());
  for (uint8_t left = reader.u8() % 8; left != 0; --left) {
    const uint8_t way = reader.u8();
    const bool bulk = (way & 1) != 0;
    const bool beside = (way & 2) != 0;
    const base::ConstSpan bytes = bulk || beside
        ? base::ConstSpan{nullptr, static_cast<size_t>(number(reader))}
        : reader.bytes(reader.u8());
    message.storages.push_back(
        {bytes,
         bulk,
         beside,
         way >> 4 == 15 ? kMetaPlace : static_cast<DevicePlace>(way >> 4),
         static_cast<WireDtype>(way >> 2 & 3)});
  }
  if ((shape & 4) != 0) {
    message.sums.assign(message.storages.size() + 1, shape);
  }
  for (uint8_t left = reader.u8() % 16; left != 0; --left) {
    TensorRecord record;
    record.layout = static_cast<TensorLayout>(reader.u8() % 9);
    record.dtype = reader.u8();
    record.flags = reader.u8();
    record.ndim = reader.u8() % 5;
    record.aux = static_cast<uint32_t>(number(reader));
    record.offset = number(reader);
    message.records.push_back(record);
    for (uint8_t i = 0; i < record.ndim; ++i) {
      const int64_t size = number(reader);
      message.dims.push_back({size, number(reader)});
    }
  }
  frame.storages = message.storages;
  frame.records = message.records;
  frame.dims = message.dims;
  frame.note = reader.bytes(reader.u8() % 4);
  frame.sums = message.sums;
}

uint64_t sizeHere(const StorageEntry& storage) {
  return storage.bytes.size * widening(storage.dtype);
}

// Whether all tensors lie within their storages. encode() does not check that;
// the codec does, which knows the tensors.
bool inBounds(const Message& message) {
  size_t at = 0;
  for (const TensorRecord& record : message.records) {
    const std::span<const Dim> dims(message.dims.data() + at, record.ndim);
    at += record.ndim;
    const auto elements = reach(record.offset, dims);
    if (record.layout == TensorLayout::kStrided &&
        *elements / 4 > sizeHere(message.storages[record.aux])) {
      return false;
    }
  }
  return true;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  base::ByteReader reader({data, size});
  Message message;
  fill(message, reader);
  auto encoded = encode(message.frame);
  if (!encoded.ok()) {
    fuzz::require(!encoded.error().message.empty(), "a refusal says why");
    return 0;
  }
  auto parsed = CallFrameView::parse(fuzz::spanOf(encoded.value()));
  fuzz::require(
      parsed.ok() == inBounds(message), "what is written can be read");
  if (!parsed.ok()) {
    return 0;
  }
  const CallFrameView& view = parsed.value();
  fuzz::require(
      view.header().callId == message.frame.header.callId &&
          view.header().flags == message.frame.header.flags &&
          view.header().kind == message.frame.header.kind &&
          view.header().answer == message.frame.header.answer &&
          view.header().timeout == message.frame.header.timeout,
      "same header");
  fuzz::require(
      view.payloadSize() == message.frame.payload.size, "same payload");
  fuzz::require(view.note().size == message.frame.note.size, "same note");
  fuzz::require(view.storageCount() == message.storages.size(), "all storages");
  fuzz::require(view.recordCount() == message.records.size(), "all records");
  fuzz::require(view.hasSums() == !message.sums.empty(), "all checksums");
  return 0;
}
