#pragma once

// Bulk on an encrypted connection. The sender seals each chunk into a staging
// buffer and sends it like a plain chunk; the receiver opens the chunk where it
// has arrived, in its final memory. The authentication tags of all chunks
// follow in one further chunk. A chunk's nonce is its tag on the receiver's
// BulkChannel, which never uses a tag twice.

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

// Receives into `into` and opens the chunks there. Returns the id that
// BulkChannel::receive() returns. `firstTag` is the first of sealedChunkCount()
// tags.
uint64_t receiveSealed(
    BulkChannel& bulk,
    base::TaskRunner& runner,
    std::string key,
    uint64_t firstTag,
    std::vector<base::MutableSpan> into,
    Callback callback);

// How many chunks bring the bytes of `into` and their authentication tags. Each
// chunk has a tag of the BulkChannel.
uint64_t sealedChunkCount(const std::vector<base::MutableSpan>& into);

} // namespace torch_rpc_ext::transport::ucx
