// The table of a frame's bulk. The first four bytes are the count, which really
// comes in the frame's header; the rest is the frame's data.

#include "base/bytes.h"
#include "fuzz/targets/target.h"
#include "transport/ucx/protocol.h"

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  base::ByteReader reader({data, size});
  const uint32_t count = reader.u32();
  const base::ConstSpan rest = reader.bytes(reader.remaining());
  auto entries = parseBulkEntries(rest, count);
  if (entries.ok()) {
    fuzz::require(entries.value().size() == count, "as many as were announced");
    const size_t bytes = count * sizeof(BulkEntry);
    fuzz::require(bytes <= rest.size, "the table is within the data");
    fuzz::requireSame(
        {entries.value().data(), bytes},
        static_cast<const uint8_t*>(rest.data),
        bytes,
        "same table");
  }
  return 0;
}
