#pragma once

// The call frame: one RPC message, request or response, as bytes. Integers are
// little-endian and unaligned. The sender writes, in this order and with
// nothing before, between or after:
//
//   bytes  field         meaning
//   2      magic         0x5254 ("TR")
//   1      version       kVersion; a receiver of another version reads no
//                        further
//   1      kind          0 request, 1 response
//   2      messageType   opaque here
//   1      answer        in a request, the dtype that float32 shall have on the
//                        wire in the answer: 0 lets the answer's sender choose,
//                        else 1 + WireDtype; 0 in a response
//   1      features      bit 0: checksums; the other bits are 0
//   4      flags         opaque here
//   4      tensors       number of tensors of the message
//   8      callId        a response repeats its request's
//   8      payload       number of bytes; bit 63: travels as bulk
//   4      storages      number of storages S
//   4      records       number of tensor records R (tensors and their parts)
//   4      timeout       ms for which the sender of a request still waits for
//                        the answer, rounded up; 0 if it waits for ever, or for
//                        longer than fits; 0 in a response
//   8 S    storage table one word for each storage:
//                        bits 0 to 46: number of bytes on the wire
//                        bits 48 to 55: DevicePlace at the receiver
//                        bits 56 and 57: WireDtype. Unless it is float32, the
//                        receiver widens each element to float32, and the
//                        records below are about the widened storage
//                        bit 62: beside the frame: the bytes travel another
//                        way, and the note tells the receiver how
//                        bit 63: the bytes travel as bulk
//                        the other bits are 0
//   8 S+8  checksums     only with checksums: one of the payload, then one of
//                        each storage's bytes as they travel; 0 for a storage
//                        beside the frame or of the meta device
//   var    tensor table  R records, see below
//   8      head checksum only with checksums: of all bytes before this field
//   var    payload       its bytes, unless they travel as bulk
//   var    storages      in table order, the bytes of each storage that has
//                        neither bit 63 nor bit 62 and is not of the meta
//                        device
//   8      note size     only if a storage has bit 62
//   var    note          only if a storage has bit 62; opaque here
//   8      note checksum only if a storage has bit 62, and with checksums
//
// Bulk is not part of these bytes: transport::Connection::send() takes it apart
// from them, first the payload if it is bulk, then the bulk storages in table
// order.
//
// A tensor record:
//
//   1      layout        TensorLayout
//   1      dtype         kStrided: number of torch's ScalarType, opaque here;
//                        else 0, because the parts have the dtype
//   1      flags         kRequiresGrad | kConj | kNeg | kCoalesced
//   1      ndim          at most kMaxDims
//   4      aux           kStrided: index of its storage; kSparseCoo: number of
//                        sparse dimensions; kQuantized: axis of the channels,
//                        or kPerTensor if all elements have one scale; else 0
//   8      offset        kStrided: where the first element is in the storage,
//                        in elements; else 0
//   16 n   dims          ndim times: size (i64), stride in elements (i64; 0
//                        unless kStrided)
//
// A sparse or quantised tensor is followed by its parts, kStrided records that
// are not tensors of the message:
//
//   kSparseCoo           indices, values
//   kSparseCsr/Csc/...   compressed indices, plain indices, values
//   kQuantized           the integers, scales, zero points (the record's own
//                        ndim is 0, because the integers have the shape)
//
// Several records may name one storage: views alias on the receiver as they do
// on the sender.

#include "base/buffer.h"
#include "base/bytes.h"
#include "base/error.h"

#include <cstdint>
#include <optional>
#include <span>

namespace torch_rpc_ext::wire {

inline constexpr uint16_t kMagic = 0x5254;
inline constexpr uint8_t kVersion = 9;

enum class CallKind : uint8_t { kRequest = 0, kResponse = 1 };

enum class TensorLayout : uint8_t {
  kUndefined = 0, // a tensor without a value
  kStrided = 1,
  kSparseCoo = 2,
  kSparseCsr = 3,
  kSparseCsc = 4,
  kSparseBsr = 5,
  kSparseBsc = 6,
  kQuantized = 7,
};

// How many kStrided records follow a record of this layout.
uint32_t partsOf(TensorLayout layout);

enum TensorFlags : uint8_t {
  kRequiresGrad = 1,
  kConj = 2,
  kNeg = 4,
  kCoalesced = 8,
};

inline constexpr uint32_t kPerTensor = 0xffffffff;

// How the float32 elements of a storage travel.
enum class WireDtype : uint8_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// How many bytes the receiver makes of each byte on the wire.
constexpr uint64_t widening(WireDtype dtype) {
  return dtype == WireDtype::kFloat32 ? 1 : 2;
}

struct CallHeader {
  CallKind kind = CallKind::kRequest;
  uint16_t messageType = 0;
  uint32_t flags = 0;
  uint64_t callId = 0;
  // Only of a request: the wire dtype that its sender wants for the answer.
  std::optional<WireDtype> answer = std::nullopt;
  // Only of a request: ms for which its sender still waits; 0 without limit.
  uint32_t timeout = 0;
};

// Where a storage is on the receiver: 0 its CPU, 255 torch's meta device, else
// 1 + index of its CUDA device.
using DevicePlace = uint8_t;
inline constexpr DevicePlace kHostPlace = 0;
inline constexpr DevicePlace kMetaPlace = 0xff;
constexpr bool isOnDevice(DevicePlace place) {
  return place != kHostPlace && place != kMetaPlace;
}

struct StorageEntry {
  base::ConstSpan bytes; // as on the wire; if not isInline() only size is used
  bool bulk = false;
  bool beside = false; // never together with bulk; only for a CUDA device
  DevicePlace place = kHostPlace;
  WireDtype dtype = WireDtype::kFloat32; // of `bytes`

  // Whether the bytes are in the frame.
  bool isInline() const {
    return !bulk && !beside && place != kMetaPlace;
  }
};

struct Dim {
  int64_t size = 0;
  int64_t stride = 0;
};

struct TensorRecord {
  TensorLayout layout = TensorLayout::kUndefined;
  uint8_t dtype = 0;
  uint8_t flags = 0;
  uint8_t ndim = 0;
  uint32_t aux = 0;
  int64_t offset = 0;
};

// What a sender gives to encode(). Owns nothing that its spans refer to.
struct CallFrame {
  CallHeader header;
  base::ConstSpan payload;
  bool payloadBulk = false;
  std::span<const StorageEntry> storages;
  std::span<const TensorRecord> records;
  std::span<const Dim> dims; // of all records, one after the other
  // Checksums of the payload and of each storage; empty for a frame without
  // checksums.
  std::span<const uint64_t> sums;
  base::ConstSpan note; // empty if nothing travels beside the frame
};

// Fails with kInvalid when a limit is exceeded or the parts of `frame` do not
// fit together.
base::Result<base::Buffer> encode(const CallFrame& frame);

// The number of elements from the beginning of the storage to the end of the
// tensor's last element. 0 if the tensor has no elements; std::nullopt if a
// number is negative or overflows.
std::optional<uint64_t> reach(int64_t offset, std::span<const Dim> dims);

// One record of a frame that was received.
struct TensorView : TensorRecord {
  uint64_t reach = 0; // kStrided: see reach() above

  Dim dim(size_t i) const; // i < ndim

 private:
  friend class TensorCursor;
  const std::byte* dims_ = nullptr;
};

// Walks over the tensor table of a CallFrameView.
class TensorCursor {
 public:
  // False at the end of the table.
  bool next(TensorView& view);

 private:
  friend class CallFrameView;
  TensorCursor(base::ConstSpan table, uint32_t records)
      : reader_(table), left_(records) {}

  base::ByteReader reader_;
  uint32_t left_;
};

struct StorageView {
  uint64_t size = 0; // on the wire
  bool bulk = false;
  bool beside = false;
  DevicePlace place = kHostPlace;
  WireDtype dtype = WireDtype::kFloat32;
  base::ConstSpan bytes; // empty unless they are in the frame
  uint64_t sum = 0; // 0 unless CallFrameView::hasSums()

  // Bytes after the receiver has widened the elements.
  uint64_t sizeHere() const {
    return size * widening(dtype);
  }
};

// Walks over the storages of a CallFrameView.
class StorageCursor {
 public:
  // False at the end of the table.
  bool next(StorageView& view);

 private:
  friend class CallFrameView;
  StorageCursor(
      base::ConstSpan table,
      base::ConstSpan sums,
      base::ConstSpan inlined)
      : table_(table), sums_(sums), inlined_(inlined) {}

  base::ByteReader table_;
  base::ByteReader sums_; // empty in a frame without checksums
  base::ByteReader inlined_;
};

// A received frame, read in place. parse() has checked: limits, counts, storage
// indices and the number of parts; that no size or stride is negative and
// nothing overflows; the checksums of the head and the note.
//
// The caller checks what parse() cannot or does not: that reach * itemsize fits
// into storageSize(aux); the meaning of dtype, flags and, unless kStrided, aux;
// the checksums of payload and storages.
//
// Owns: nothing; the bytes must outlive the view.
// Thread: one.
class CallFrameView {
 public:
  // Fails with kCorrupted if a checksum is wrong, else with kInvalid.
  static base::Result<CallFrameView> parse(base::ConstSpan frame);

  const CallHeader& header() const {
    return header_;
  }

  uint64_t payloadSize() const {
    return payloadSize_;
  }
  bool payloadBulk() const {
    return payloadBulk_;
  }
  base::ConstSpan payload() const { // empty when bulk
    return payload_;
  }

  uint32_t storageCount() const {
    return storageCount_;
  }
  // Bytes after the receiver has widened the elements; index < storageCount().
  uint64_t storageSize(uint32_t index) const;
  bool hasSums() const {
    return hasSums_;
  }
  uint64_t payloadSum() const {
    return payloadSum_;
  }
  // Whether a storage is for a CUDA device.
  bool hasDevices() const {
    return hasDevices_;
  }
  // Whether a storage travels beside the frame.
  bool hasBeside() const {
    return hasBeside_;
  }
  base::ConstSpan note() const {
    return note_;
  }
  StorageCursor storages() const {
    return {storageTable_, sums_, inlined_};
  }

  uint32_t tensorCount() const { // without parts
    return tensorCount_;
  }
  uint32_t recordCount() const { // with parts
    return recordCount_;
  }
  TensorCursor records() const {
    return {tensorTable_, recordCount_};
  }

 private:
  CallFrameView() = default;
  base::Error parseHeader(base::ByteReader& reader);
  base::Error parseStorages(base::ByteReader& reader, uint64_t& inlineBytes);
  base::Error parseSums(base::ByteReader& reader);
  base::Error parseRecords(base::ByteReader& reader);
  base::Error parseNote(base::ByteReader& reader);

  CallHeader header_;
  uint64_t payloadSize_ = 0;
  bool payloadBulk_ = false;
  uint32_t storageCount_ = 0;
  bool hasDevices_ = false;
  bool hasBeside_ = false;
  bool hasSums_ = false;
  uint64_t payloadSum_ = 0;
  uint32_t tensorCount_ = 0;
  uint32_t recordCount_ = 0;
  base::ConstSpan storageTable_;
  base::ConstSpan sums_; // of storages
  base::ConstSpan tensorTable_;
  base::ConstSpan payload_;
  base::ConstSpan inlined_;
  base::ConstSpan note_;
};

} // namespace torch_rpc_ext::wire
