#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "transport/transport.h"
#include "transport/ucx/bulk/link.h"

#include <cstdint>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

// Moves bulk between processes that cannot read each other's memory, beside the
// connections that carry calls, so that small calls never queue behind bulk.
// Bulk travels in chunks of up to kChunkBytes, each with a tag that the
// receiver has reserved (Resources::reserveTags()). The receiver expects the
// chunks before it asks the sender for them.
//
// Thread: any.
class Channel {
 public:
  virtual ~Channel() = default;

  // Where `peer` reaches this channel by send().
  virtual base::Result<std::string> addressFor(const Peer& peer) = 0;

  // Expects chunks, which come with the tags `tag`, `tag` + 1, and so on.
  // Returns an id for cancel(). `arrived`, which may be null, is called for
  // chunks that have arrived, in any order.
  virtual uint64_t receive(
      uint64_t tag,
      std::vector<base::MutableSpan> chunks,
      Callback callback,
      Incoming::Arrived arrived) = 0;
  // Ends a receive() with an error, unless it has ended.
  virtual void cancel(uint64_t id, base::Error why) = 0;

  // Sends chunks to the channel at `address`, with the tags `tag`, `tag` + 1,
  // and so on; the callback fires when this end does not read them any more.
  virtual void send(
      const std::string& address,
      uint64_t tag,
      std::vector<base::ConstSpan> chunks,
      Callback callback) = 0;

  // Ends what is under way.
  virtual void stop() = 0;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
