#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "transport/transport.h"
#include "transport/ucx/bulk/exchange.h"

#include <cstdint>
#include <memory>

namespace torch_rpc_ext::transport::ucx {

// Turns the data of a kFrame (the table of spans, carried bulk, the head) into
// an Incoming. `bulk` is that of the connection over which the frame has
// arrived.
base::Result<std::unique_ptr<Incoming>> makeIncoming(
    std::shared_ptr<bulk::Exchange> bulk,
    uint64_t transfer,
    uint32_t firstSpan,
    uint32_t count,
    base::Buffer data,
    uint64_t maxBytes);

} // namespace torch_rpc_ext::transport::ucx
