// An RPC message: reads everything in a frame, and writes an accepted frame
// again.

#include "wire/call_frame.h"
#include "fuzz/targets/target.h"
#include "wire/limits.h"

#include <algorithm>
#include <numeric>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::wire;

namespace {

// Reads each byte, so that the sanitizer checks the access.
void touch(base::ConstSpan span) {
  const auto* bytes = static_cast<const uint8_t*>(span.data);
  volatile unsigned sum = std::accumulate(bytes, bytes + span.size, 0u);
  (void)sum;
}

// Adds the storages' checksums to `sums`.
std::vector<StorageEntry> storagesOf(
    const CallFrameView& view,
    std::vector<uint64_t>& sums) {
  std::vector<StorageEntry> storages;
  StorageView storage;
  for (auto cursor = view.storages(); cursor.next(storage);) {
    fuzz::require(
        storage.sizeHere() <= kMaxStorageBytes, "a storage has a limit");
    fuzz::require(
        storage.sizeHere() ==
            view.storageSize(static_cast<uint32_t>(storages.size())),
        "storageSize() says what the cursor says");
    touch(storage.bytes);
    storages.push_back(
        {{storage.bytes.data, storage.size},
         storage.bulk,
         storage.beside,
         storage.place,
         storage.dtype});
    sums.push_back(storage.sum);
  }
  fuzz::require(storages.size() == view.storageCount(), "all storages");
  return storages;
}

void checkRecord(const TensorView& tensor, const CallFrameView& view) {
  fuzz::require(tensor.ndim <= kMaxDims, "dimensions have a limit");
  bool empty = false;
  for (size_t i = 0; i < tensor.ndim; ++i) {
    const Dim dim = tensor.dim(i);
    fuzz::require(dim.size >= 0 && dim.stride >= 0, "nothing is negative");
    empty |= dim.size == 0;
  }
  if (tensor.layout != TensorLayout::kStrided) {
    return;
  }
  fuzz::require(tensor.aux < view.storageCount(), "its storage is there");
  fuzz::require(empty == (tensor.reach == 0), "only empty ones reach nowhere");
  fuzz::require(
      tensor.reach / 4 <= view.storageSize(tensor.aux),
      "a tensor ends within its storage");
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const base::ConstSpan bytes{data, size};
  auto parsed = CallFrameView::parse(bytes);
  if (!parsed.ok()) {
    fuzz::require(!parsed.error().message.empty(), "a refusal says why");
    return 0;
  }
  const CallFrameView& view = parsed.value();
  touch(view.payload());
  std::vector<uint64_t> sums{view.payloadSum()};
  const auto storages = storagesOf(view, sums);
  std::vector<TensorRecord> records;
  std::vector<Dim> dims;
  TensorView tensor;
  for (auto cursor = view.records(); cursor.next(tensor);) {
    checkRecord(tensor, view);
    records.push_back(tensor);
    for (size_t i = 0; i < tensor.ndim; ++i) {
      dims.push_back(tensor.dim(i));
    }
  }
  fuzz::require(records.size() == view.recordCount(), "all records");

  CallFrame frame;
  frame.header = view.header();
  frame.payload = {view.payload().data, view.payloadSize()};
  frame.payloadBulk = view.payloadBulk();
  frame.storages = storages;
  frame.records = records;
  frame.dims = dims;
  frame.note = view.note();
  touch(view.note());
  if (view.hasSums()) {
    frame.sums = sums;
  }
  auto encoded = encode(frame);
  fuzz::require(encoded.ok(), "what was accepted can be written");
  fuzz::requireSame(fuzz::spanOf(encoded.value()), data, size, "same frame");
  return 0;
}
