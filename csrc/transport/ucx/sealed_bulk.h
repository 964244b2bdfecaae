#pragma once

// Bulk on an encrypted connection: each chunk is sealed into a staging buffer,
// sent as it is sent otherwise, and opened in the receiver's memory. The tags
// of all chunks follow as one chunk more. A chunk's nonce is its number on the
// receiver's BulkChannel, which is never used twice.

#include "base/buffer.h"
#include "base/task.h"
#include "transport/transport.h"
#include "transport/ucx/bulk_channel.h"
#include "transport/ucx/protocol.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// Sends `spans` as the answer to `pull`. `callback` may run on any thread.
void sendSealed(
    std::shared_ptr<BulkChannel> bulk,
    base::TaskRunner& runner,
    std::string key,
    const PullRequest& pull,
    const std::vector<BulkSpan>& spans,
    Callback callback);

// Receives into `into` and opens it there; returns what BulkChannel::receive()
// does. `firstTag` is the first of sealedChunkCount() tags.
uint64_t receiveSealed(
    BulkChannel& bulk,
    base::TaskRunner& runner,
    std::string key,
    uint64_t firstTag,
    std::vector<base::MutableSpan> into,
    Callback callback);

// How many chunks, each with a tag of UCX's, bring what fills `into` and the
// authentication tags of that.
uint64_t sealedChunkCount(const std::vector<base::MutableSpan>& into);

} // namespace torch_rpc_ext::transport::ucx
