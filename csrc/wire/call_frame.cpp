#include "wire/call_frame.h"

#include "base/checksum.h"
#include "wire/limits.h"

#include <algorithm>
#include <string>

namespace torch_rpc_ext::wire {

using base::ByteReader;
using base::ByteWriter;
using base::ConstSpan;
using base::Error;
using base::ErrorKind;
using base::Result;

namespace {

constexpr size_t kHeaderBytes = 44;
constexpr size_t kStorageBytes = 8;
constexpr size_t kRecordBytes = 16;
constexpr size_t kDimBytes = 16;
constexpr size_t kNoteSizeBytes = 8;
constexpr size_t kSumBytes = 8;
constexpr uint8_t kSumsBit = 1; // of the features
constexpr uint64_t kBulkBit = uint64_t{1} << 63;
constexpr uint64_t kBesideBit = uint64_t{1} << 62;
constexpr int kPlaceShift = 48;
constexpr uint64_t kPlaceBits = uint64_t{0xff} << kPlaceShift;
constexpr int kDtypeShift = 56;
constexpr uint64_t kDtypeBits = uint64_t{3} << kDtypeShift;
constexpr uint64_t kSizeBits = (uint64_t{1} << (kPlaceShift - 1)) - 1;
static_assert(kMaxStorageBytes <= kSizeBits);

Error invalid(std::string text) {
  return {ErrorKind::kInvalid, "call frame: " + std::move(text)};
}

Error exceeds(const char* what, uint64_t value, uint64_t limit) {
  return invalid(
      std::string(what) + " " + std::to_string(value) +
      " exceeds the limit of " + std::to_string(limit));
}

Error truncated(size_t size) {
  return invalid(
      "the " + std::to_string(size) + " bytes end before the frame does");
}

// Computes reach(). Also refuses sizes whose product overflows, where a size of
// 0 counts as 1, as it does when torch computes strides.
class Reach {
 public:
  void add(Dim dim) {
    if (dim.size < 0 || dim.stride < 0) {
      bad_ = true;
      return;
    }
    empty_ |= dim.size == 0;
    const int64_t size = dim.size == 0 ? 1 : dim.size;
    int64_t step = 0;
    bad_ |= __builtin_mul_overflow(numel_, size, &numel_) ||
        __builtin_mul_overflow(size - 1, dim.stride, &step) ||
        __builtin_add_overflow(last_, step, &last_);
  }

  std::optional<uint64_t> from(int64_t offset) const {
    int64_t end = 0;
    if (bad_ || offset < 0 || offset > kMaxStorageOffset ||
        __builtin_add_overflow(last_, offset, &end) ||
        __builtin_add_overflow(end, int64_t{1}, &end)) {
      return std::nullopt;
    }
    return empty_ ? 0 : static_cast<uint64_t>(end);
  }

 private:
  int64_t numel_ = 1;
  int64_t last_ = 0;
  bool empty_ = false;
  bool bad_ = false;
};

// Checks records one after the other, each by itself and as a part of the
// tensor that an earlier record began. Sender and receiver both use this.
class RecordChecker {
 public:
  explicit RecordChecker(uint32_t storages) : storages_(storages) {}

  Error check(const TensorRecord& record) {
    if (record.layout > TensorLayout::kQuantized) {
      return invalid(
          "unknown tensor layout " +
          std::to_string(static_cast<int>(record.layout)));
    }
    if (record.ndim > kMaxDims) {
      return exceeds("number of dimensions", record.ndim, kMaxDims);
    }
    if (partsLeft_ > 0) {
      --partsLeft_;
      if (record.layout != TensorLayout::kStrided) {
        return invalid("the part of a tensor is not strided");
      }
    } else {
      ++tensors_;
      partsLeft_ = partsOf(record.layout);
    }
    if (record.layout == TensorLayout::kStrided && record.aux >= storages_) {
      return invalid(
          "a tensor names storage " + std::to_string(record.aux) + " of " +
          std::to_string(storages_));
    }
    return {};
  }

  uint32_t tensors() const {
    return tensors_;
  }
  bool complete() const {
    return partsLeft_ == 0;
  }

 private:
  uint32_t storages_;
  uint32_t partsLeft_ = 0;
  uint32_t tensors_ = 0;
};

Error unreachable(const TensorRecord& record) {
  return invalid(
      "sizes, strides or offset of a tensor with " +
      std::to_string(record.ndim) + " dimensions are negative or overflow");
}

Dim readDim(ByteReader& reader) {
  Dim dim;
  dim.size = reader.i64();
  dim.stride = reader.i64();
  return dim;
}

// reach() of a record whose dimensions are as in a frame.
std::optional<uint64_t> reachOf(const TensorRecord& record, ConstSpan dims) {
  ByteReader reader(dims);
  Reach reach;
  for (size_t i = 0; i < record.ndim; ++i) {
    reach.add(readDim(reader));
  }
  return reach.from(record.offset);
}

TensorRecord readRecord(ByteReader& reader) {
  TensorRecord record;
  record.layout = static_cast<TensorLayout>(reader.u8());
  record.dtype = reader.u8();
  record.flags = reader.u8();
  record.ndim = reader.u8();
  record.aux = reader.u32();
  record.offset = reader.i64();
  return record;
}

void writeRecord(ByteWriter& writer, const TensorRecord& record) {
  writer.u8(static_cast<uint8_t>(record.layout));
  writer.u8(record.dtype);
  writer.u8(record.flags);
  writer.u8(record.ndim);
  writer.u32(record.aux);
  writer.i64(record.offset);
}

uint64_t wordOf(const StorageEntry& storage) {
  return storage.bytes.size | (storage.bulk ? kBulkBit : 0) |
      (storage.beside ? kBesideBit : 0) |
      uint64_t{storage.place} << kPlaceShift |
      static_cast<uint64_t>(storage.dtype) << kDtypeShift;
}

DevicePlace placeOf(uint64_t word) {
  return static_cast<DevicePlace>((word & kPlaceBits) >> kPlaceShift);
}

WireDtype dtypeOf(uint64_t word) {
  return static_cast<WireDtype>((word & kDtypeBits) >> kDtypeShift);
}

// Checks one storage. `word` is its word in the table, `bytes` its size, which
// may be too large for the word if a sender gives it.
Error checkStorage(uint64_t word, uint64_t bytes) {
  if (bytes > kMaxStorageBytes) {
    return exceeds("storage size", bytes, kMaxStorageBytes);
  }
  if ((word & kDtypeBits) == kDtypeBits) {
    return invalid("a storage has an unknown dtype on the wire");
  }
  const uint64_t factor = widening(dtypeOf(word));
  if (bytes > kMaxStorageBytes / factor) {
    return exceeds("storage size", bytes, kMaxStorageBytes / factor);
  }
  if (bytes % factor != 0) {
    return invalid(
        "a storage of " + std::to_string(bytes) +
        " bytes is not a whole number of 2-byte elements");
  }
  if (placeOf(word) == kMetaPlace &&
      (word & (kBulkBit | kBesideBit | kDtypeBits)) != 0) {
    return invalid("the bytes of a storage of the meta device travel");
  }
  if ((word & kBesideBit) != 0 && placeOf(word) == kHostPlace) {
    return invalid("a storage for the CPU travels beside the frame");
  }
  return {};
}

bool isInline(uint64_t word) {
  return (word & (kBulkBit | kBesideBit)) == 0 && placeOf(word) != kMetaPlace;
}

bool hasBeside(const CallFrame& frame) {
  return std::any_of(
      frame.storages.begin(), frame.storages.end(), [](const auto& storage) {
        return storage.beside;
      });
}

// Checks the numbers of a header. Sender and receiver both use this.
Error checkHeader(
    const CallHeader& header,
    uint64_t payloadSize,
    uint64_t storages,
    uint64_t records) {
  if (header.answer && header.kind == CallKind::kResponse) {
    return invalid("a response asks for a dtype of its answer");
  }
  if (header.timeout != 0 && header.kind == CallKind::kResponse) {
    return invalid("a response has a time-out");
  }
  if (payloadSize > kMaxPayloadBytes) {
    return exceeds("payload size", payloadSize, kMaxPayloadBytes);
  }
  if (storages > kMaxStorages) {
    return exceeds("number of storages", storages, kMaxStorages);
  }
  if (records > kMaxRecords) {
    return exceeds("number of tensor records", records, kMaxRecords);
  }
  return {};
}

// Checks what the sender gave, counts its tensors, and returns the frame's
// size.
Result<size_t> measure(const CallFrame& frame, uint32_t& tensors) {
  if (auto error = checkHeader(
          frame.header,
          frame.payload.size,
          frame.storages.size(),
          frame.records.size())) {
    return error;
  }
  uint64_t total = kHeaderBytes + frame.storages.size() * kStorageBytes +
      frame.records.size() * kRecordBytes + frame.dims.size() * kDimBytes +
      (frame.payloadBulk ? 0 : frame.payload.size);
  for (const auto& storage : frame.storages) {
    if (auto error = checkStorage(wordOf(storage), storage.bytes.size)) {
      return error;
    }
    if (storage.beside && storage.bulk) {
      return invalid("a storage that is bulk travels beside the frame");
    }
    // Checked at each step, because the sum of all sizes may overflow.
    total += storage.isInline() ? storage.bytes.size : 0;
    if (total > kMaxFrameBytes) {
      return exceeds("frame size", total, kMaxFrameBytes);
    }
  }
  if (frame.note.size > kMaxNoteBytes) {
    return exceeds("note size", frame.note.size, kMaxNoteBytes);
  }
  if (hasBeside(frame)) {
    total += kNoteSizeBytes + frame.note.size;
  } else if (frame.note.size != 0) {
    return invalid("there is a note, but nothing travels beside the frame");
  }
  if (!frame.sums.empty()) {
    if (frame.sums.size() != frame.storages.size() + 1) {
      return invalid("not one checksum for the payload and for each storage");
    }
    total += (frame.sums.size() + 1) * kSumBytes;
    total += hasBeside(frame) ? kSumBytes : 0;
  }
  if (total > kMaxFrameBytes) {
    return exceeds("frame size", total, kMaxFrameBytes);
  }
  RecordChecker checker(static_cast<uint32_t>(frame.storages.size()));
  size_t dims = 0;
  for (const auto& record : frame.records) {
    if (auto error = checker.check(record)) {
      return error;
    }
    if (record.ndim > frame.dims.size() - dims) {
      return invalid("fewer dimensions than the records name");
    }
    if (!reach(record.offset, frame.dims.subspan(dims, record.ndim))) {
      return unreachable(record);
    }
    dims += record.ndim;
  }
  if (dims != frame.dims.size() || !checker.complete()) {
    return invalid("more dimensions, or fewer parts, than the records name");
  }
  tensors = checker.tensors();
  return static_cast<size_t>(total);
}

void writeHeader(ByteWriter& writer, const CallFrame& frame, uint32_t tensors) {
  const auto& header = frame.header;
  writer.u16(kMagic);
  writer.u8(kVersion);
  writer.u8(static_cast<uint8_t>(header.kind));
  writer.u16(header.messageType);
  writer.u8(header.answer ? 1 + static_cast<uint8_t>(*header.answer) : 0);
  writer.u8(frame.sums.empty() ? 0 : kSumsBit);
  writer.u32(header.flags);
  writer.u32(tensors);
  writer.u64(header.callId);
  writer.u64(frame.payload.size | (frame.payloadBulk ? kBulkBit : 0));
  writer.u32(static_cast<uint32_t>(frame.storages.size()));
  writer.u32(static_cast<uint32_t>(frame.records.size()));
  writer.u32(header.timeout);
}

void writeTables(ByteWriter& writer, const CallFrame& frame) {
  for (const auto& storage : frame.storages) {
    writer.u64(wordOf(storage));
  }
  for (const uint64_t sum : frame.sums) {
    writer.u64(sum);
  }
  const Dim* dim = frame.dims.data();
  for (const auto& record : frame.records) {
    writeRecord(writer, record);
    for (const Dim* end = dim + record.ndim; dim != end; ++dim) {
      writer.i64(dim->size);
      writer.i64(dim->stride);
    }
  }
}

} // namespace

uint32_t partsOf(TensorLayout layout) {
  switch (layout) {
    case TensorLayout::kUndefined:
    case TensorLayout::kStrided:
      return 0;
    case TensorLayout::kSparseCoo:
      return 2;
    case TensorLayout::kSparseCsr:
    case TensorLayout::kSparseCsc:
    case TensorLayout::kSparseBsr:
    case TensorLayout::kSparseBsc:
    case TensorLayout::kQuantized:
      return 3;
  }
  return 0;
}

std::optional<uint64_t> reach(int64_t offset, std::span<const Dim> dims) {
  Reach result;
  for (const auto& dim : dims) {
    result.add(dim);
  }
  return result.from(offset);
}

Result<base::Buffer> encode(const CallFrame& frame) {
  uint32_t tensors = 0;
  auto size = measure(frame, tensors);
  if (!size.ok()) {
    return size.error();
  }
  base::Buffer buffer(size.value());
  ByteWriter writer(buffer);
  writeHeader(writer, frame, tensors);
  writeTables(writer, frame);
  if (!frame.sums.empty()) {
    writer.u64(
        base::checksum({buffer.data(), buffer.size() - writer.remaining()}));
  }
  if (!frame.payloadBulk) {
    writer.bytes(frame.payload);
  }
  for (const auto& storage : frame.storages) {
    if (storage.isInline()) {
      writer.bytes(storage.bytes);
    }
  }
  if (hasBeside(frame)) {
    writer.u64(frame.note.size);
    writer.bytes(frame.note);
    if (!frame.sums.empty()) {
      writer.u64(base::checksum(frame.note));
    }
  }
  if (writer.failed() || writer.remaining() != 0) {
    return invalid("size was computed wrongly (a bug)");
  }
  return buffer;
}

Dim TensorView::dim(size_t i) const {
  if (i >= ndim) {
    return {};
  }
  ByteReader reader(ConstSpan{dims_ + i * kDimBytes, kDimBytes});
  return readDim(reader);
}

bool TensorCursor::next(TensorView& view) {
  if (left_ == 0) {
    return false;
  }
  --left_;
  static_cast<TensorRecord&>(view) = readRecord(reader_);
  const ConstSpan dims = reader_.bytes(uint64_t{view.ndim} * kDimBytes);
  if (reader_.failed()) {
    view.ndim = 0;
    return false;
  }
  view.dims_ = static_cast<const std::byte*>(dims.data);
  view.reach = reachOf(view, dims).value_or(0);
  return true;
}

bool StorageCursor::next(StorageView& view) {
  if (table_.remaining() == 0) {
    return false;
  }
  const uint64_t word = table_.u64();
  view.size = word & kSizeBits;
  view.bulk = (word & kBulkBit) != 0;
  view.beside = (word & kBesideBit) != 0;
  view.place = placeOf(word);
  view.dtype = dtypeOf(word);
  view.sum = sums_.remaining() == 0 ? 0 : sums_.u64();
  view.bytes = isInline(word) ? inlined_.bytes(view.size) : ConstSpan{};
  return !table_.failed() && !inlined_.failed();
}

Result<CallFrameView> CallFrameView::parse(ConstSpan frame) {
  ByteReader reader(frame);
  CallFrameView view;
  uint64_t inlineBytes = 0;
  if (auto error = view.parseHeader(reader)) {
    return error;
  }
  if (auto error = view.parseStorages(reader, inlineBytes)) {
    return error;
  }
  if (auto error = view.parseSums(reader)) {
    return error;
  }
  if (auto error = view.parseRecords(reader)) {
    return error;
  }
  if (view.hasSums_) {
    const ConstSpan head{frame.data, frame.size - reader.remaining()};
    const uint64_t sum = reader.u64();
    if (!reader.failed() && sum != base::checksum(head)) {
      return Error(
          ErrorKind::kCorrupted,
          "call frame: its description changed on the way: the " +
              std::to_string(head.size) + " bytes have another checksum");
    }
  }
  view.payload_ = reader.bytes(view.payloadBulk_ ? 0 : view.payloadSize_);
  view.inlined_ = reader.bytes(inlineBytes);
  if (auto error = view.parseNote(reader)) {
    return error;
  }
  if (reader.failed()) {
    return truncated(frame.size);
  }
  if (reader.remaining() != 0) {
    return invalid(
        std::to_string(reader.remaining()) + " of " +
        std::to_string(frame.size) + " bytes are left over");
  }
  return view;
}

Error CallFrameView::parseHeader(ByteReader& reader) {
  const size_t size = reader.remaining();
  const uint16_t magic = reader.u16();
  const uint8_t version = reader.u8();
  if (reader.failed()) {
    return truncated(size);
  }
  if (magic != kMagic) {
    return invalid("these bytes are not a call frame (wrong magic number)");
  }
  if (version != kVersion) {
    return invalid(
        "the peer speaks version " + std::to_string(version) +
        " of the wire format, this worker version " + std::to_string(kVersion));
  }
  const uint8_t kind = reader.u8();
  header_.messageType = reader.u16();
  const uint8_t answer = reader.u8();
  const uint8_t features = reader.u8();
  header_.flags = reader.u32();
  tensorCount_ = reader.u32();
  header_.callId = reader.u64();
  const uint64_t payload = reader.u64();
  storageCount_ = reader.u32();
  recordCount_ = reader.u32();
  header_.timeout = reader.u32();
  if (reader.failed()) {
    return truncated(size);
  }
  if (kind > static_cast<uint8_t>(CallKind::kResponse) ||
      (features & ~kSumsBit) != 0) {
    return invalid("unknown kind or reserved bits");
  }
  header_.kind = static_cast<CallKind>(kind);
  hasSums_ = (features & kSumsBit) != 0;
  if (answer != 0) {
    header_.answer = static_cast<WireDtype>(answer - 1);
    if (*header_.answer > WireDtype::kFloat16) {
      return invalid("unknown dtype for the answer");
    }
  }
  payloadSize_ = payload & ~kBulkBit;
  payloadBulk_ = (payload & kBulkBit) != 0;
  return checkHeader(header_, payloadSize_, storageCount_, recordCount_);
}

Error CallFrameView::parseStorages(ByteReader& reader, uint64_t& inlineBytes) {
  const size_t size = reader.remaining();
  storageTable_ = reader.bytes(uint64_t{storageCount_} * kStorageBytes);
  if (reader.failed()) {
    return truncated(size);
  }
  ByteReader table(storageTable_);
  for (uint32_t i = 0; i < storageCount_; ++i) {
    const uint64_t word = table.u64();
    const uint64_t bytes = word & kSizeBits;
    if (auto error = checkStorage(word, bytes)) {
      return error;
    }
    constexpr uint64_t kKnown =
        kBulkBit | kBesideBit | kDtypeBits | kPlaceBits | kSizeBits;
    constexpr uint64_t kBoth = kBulkBit | kBesideBit;
    if ((word & ~kKnown) != 0 || (word & kBoth) == kBoth) {
      return invalid("reserved or contradictory bits in the storage table");
    }
    hasDevices_ |= isOnDevice(placeOf(word));
    hasBeside_ |= (word & kBesideBit) != 0;
    // Checked at each step, because the sum of all sizes may overflow.
    inlineBytes += isInline(word) ? bytes : 0;
    if (inlineBytes > kMaxFrameBytes) {
      return exceeds("frame size", inlineBytes, kMaxFrameBytes);
    }
  }
  return {};
}

Error CallFrameView::parseSums(ByteReader& reader) {
  if (!hasSums_) {
    return {};
  }
  const size_t size = reader.remaining();
  payloadSum_ = reader.u64();
  sums_ = reader.bytes(uint64_t{storageCount_} * kSumBytes);
  return reader.failed() ? truncated(size) : Error{};
}

Error CallFrameView::parseRecords(ByteReader& reader) {
  const ConstSpan rest = ByteReader(reader).bytes(reader.remaining());
  RecordChecker checker(storageCount_);
  for (uint32_t i = 0; i < recordCount_; ++i) {
    const TensorRecord record = readRecord(reader);
    const ConstSpan dims = reader.bytes(uint64_t{record.ndim} * kDimBytes);
    if (reader.failed()) {
      return truncated(rest.size);
    }
    if (auto error = checker.check(record)) {
      return error;
    }
    const auto elements = reachOf(record, dims);
    if (!elements) {
      return unreachable(record);
    }
    // No dtype packs more than four elements into a byte. The caller, who knows
    // the dtype, checks the exact size.
    if (record.layout == TensorLayout::kStrided &&
        *elements / 4 > storageSize(record.aux)) {
      return invalid(
          "a tensor reaches over " + std::to_string(*elements) +
          " elements of a storage of " +
          std::to_string(storageSize(record.aux)) + " bytes");
    }
  }
  if (!checker.complete() || checker.tensors() != tensorCount_) {
    return invalid("tensors and records do not match");
  }
  tensorTable_ = ConstSpan{rest.data, rest.size - reader.remaining()};
  return {};
}

Error CallFrameView::parseNote(ByteReader& reader) {
  if (!hasBeside_) {
    return {};
  }
  const uint64_t size = reader.u64();
  if (size > kMaxNoteBytes) {
    return exceeds("note size", size, kMaxNoteBytes);
  }
  note_ = reader.bytes(size);
  if (!hasSums_ || reader.failed()) {
    return {};
  }
  const uint64_t here = base::checksum(note_);
  const uint64_t sent = reader.u64();
  if (here != sent && !reader.failed()) {
    return {ErrorKind::kCorrupted, "call frame: its note changed on its way"};
  }
  return {};
}

uint64_t CallFrameView::storageSize(uint32_t index) const {
  ByteReader reader(storageTable_);
  reader.bytes(uint64_t{index} * kStorageBytes);
  const uint64_t word = reader.u64();
  return (word & kSizeBits) * widening(dtypeOf(word));
}

} // namespace torch_rpc_ext::wire
