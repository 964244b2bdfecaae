#pragma once

#include "transport/transport.h"
#include "transport/ucx/bulk_channel.h"
#include "transport/ucx/protocol.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// The part of a bulk span that one tagged message carries.
struct Chunk : base::ConstSpan {
  std::shared_ptr<Filling> filling; // null: the bytes are there
  uint64_t filledAt = 0;
};

std::vector<Chunk> toChunks(const std::vector<BulkSpan>& spans);

bool anyFilling(const std::vector<BulkSpan>& spans);

// Sends each chunk once its bytes are there, as the answer to `pull`.
// `callback` fires when UCX does not read the chunks any more. No further chunk
// is sent once one has failed, or once `ended` says that nobody receives any
// more.
void sendAsFilled(
    std::shared_ptr<BulkChannel> bulk,
    const PullRequest& pull,
    const std::vector<BulkSpan>& spans,
    std::function<bool()> ended,
    Callback callback);

} // namespace torch_rpc_ext::transport::ucx
