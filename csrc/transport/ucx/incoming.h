#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "transport/transport.h"
#include "transport/ucx/bulk/exchange.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <memory>

namespace torch_rpc_ext::transport::ucx {

// Both turn a frame into an Incoming. `bulk` is that of the connection over
// which the frame has arrived, `count` the number of the frame's spans. They
// fail with kInvalid for a frame that no sender of ours makes, and with
// kRefused for a frame that has, with its bulk, more than `maxBytes` (0: no
// limit).

// `data` of a kFrame: the table of spans, carried bulk, the head. Is copied.
base::Result<std::unique_ptr<Incoming>> makeIncoming(
    Locked& locked,
    std::shared_ptr<bulk::Exchange> bulk,
    uint64_t transfer,
    uint32_t count,
    base::ConstSpan data,
    uint64_t maxBytes);

// `frame` is what a kBigFrame has announced: the table of spans, and the head.
base::Result<std::unique_ptr<Incoming>> makeBigIncoming(
    std::shared_ptr<bulk::Exchange> bulk,
    uint64_t transfer,
    uint32_t count,
    base::Buffer frame,
    uint64_t maxBytes);

} // namespace torch_rpc_ext::transport::ucx
