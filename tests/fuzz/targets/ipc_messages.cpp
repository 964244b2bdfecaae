// The messages of CUDA IPC: an accepted message keeps the promises of
// ipc_wire.h, and can be written and read again.

#include "agent/device/ipc_wire.h"
#include "fuzz/targets/target.h"

#include <algorithm>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::agent::device;

namespace {

void checkNote(base::ByteReader reader) {
  std::vector<uint64_t> sizes(reader.u8() % 8);
  for (uint64_t& size : sizes) {
    size = uint64_t{reader.u8()} * 8;
  }
  const base::ConstSpan bytes = reader.bytes(reader.remaining());
  auto note = IpcNote::read(bytes, sizes);
  if (!note.ok()) {
    fuzz::require(!note.error().message.empty(), "a refusal says why");
    return;
  }
  std::vector<int> seen(sizes.size());
  for (const auto& run : note.value().runs) {
    uint64_t least = 0;
    for (const uint32_t storage : run.storages) {
      fuzz::require(storage < sizes.size(), "a storage that is there");
      ++seen[storage];
      least += sizes[storage];
    }
    fuzz::require(run.memory.bytes >= least, "a run holds its storages");
    fuzz::require(
        run.memory.offset + run.memory.bytes <= run.memory.size,
        "a run is in its allocation");
  }
  fuzz::require(
      std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }),
      "each storage once");
  fuzz::require(
      IpcNote::tokenOf(bytes).value() == note.value().token, "same token");
  fuzz::requireSame(
      fuzz::spanOf(note.value().write()),
      static_cast<const uint8_t*>(bytes.data),
      bytes.size,
      "same note");
}

template <typename Message>
void checkAgain(base::ConstSpan bytes) {
  auto message = Message::read(bytes);
  if (!message.ok()) {
    fuzz::require(!message.error().message.empty(), "a refusal says why");
    return;
  }
  const auto written = message.value().write();
  fuzz::require(
      Message::read({written.data(), written.size()}).ok(),
      "what was accepted can be written");
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  base::ByteReader reader({data, size});
  const uint8_t kind = reader.u8();
  if (kind % 4 == 0) {
    checkNote(reader);
    return 0;
  }
  const base::ConstSpan bytes = reader.bytes(reader.remaining());
  fuzz::require(
      IpcNote::tokenOf(bytes).ok() == (bytes.size >= 8), "a token has 8 bytes");
  if (kind % 4 == 1) {
    checkAgain<IpcOffer>(bytes);
  } else if (kind % 4 == 2) {
    checkAgain<IpcVerdict>(bytes);
  } else {
    fuzz::require(
        readReleased(bytes).ok() == (bytes.size == 8), "a release has 8 bytes");
  }
  return 0;
}
