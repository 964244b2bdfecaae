#pragma once

#include "transport/transport.h"
#include "transport/ucx/bulk_channel.h"
#include "transport/ucx/protocol.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// What a tagged message carries of a bulk span that is sent.
struct Chunk : base::ConstSpan {
  std::shared_ptr<Filling> filling; // null: it is there
  uint64_t filledAt = 0;
};

std::vector<Chunk> toChunks(const std::vector<BulkSpan>& spans);

bool anyFilling(const std::vector<BulkSpan>& spans);

// Sends each chunk once it is there, as the answer to `pull`. `callback` fires
// when UCX needs none of them any more; nothing more leaves once one has
// failed, or once `ended` says that nobody receives.
void sendAsFilled(
    std::shared_ptr<BulkChannel> bulk,
    const PullRequest& pull,
    const std::vector<BulkSpan>& spans,
    std::function<bool()> ended,
    Callback callback);

} // namespace torch_rpc_ext::transport::ucx
