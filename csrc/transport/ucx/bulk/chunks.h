#pragma once

#include "base/buffer.h"
#include "base/task.h"
#include "transport/transport.h"
#include "transport/ucx/bulk/channel.h"
#include "transport/ucx/bulk/transfers.h"
#include "transport/ucx/protocol.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

// How the spans of a kPull travel over a Channel: cut into chunks.
// Thread: any.
class Chunks {
 public:
  virtual ~Chunks() = default;

  // How many tags the chunks of `into` need.
  virtual uint64_t tagsFor(
      const std::vector<base::MutableSpan>& into) const = 0;
  // As Channel::receive().
  virtual uint64_t receive(
      Channel& channel,
      uint64_t firstTag,
      std::vector<base::MutableSpan> into,
      Callback callback,
      Incoming::Arrived arrived) const = 0;
  // Sends each chunk once its bytes are there, as the answer to `pull`.
  // `callback` fires when the channel does not read the spans any more. No
  // further chunk is sent once one has failed, or once `ended` says that nobody
  // receives any more.
  virtual void send(
      const std::shared_ptr<Channel>& channel,
      const PullRequest& pull,
      const Spans& spans,
      std::function<bool()> ended,
      Callback callback) const = 0;
};

std::shared_ptr<const Chunks> plainChunks();

// Encrypts what plainChunks() then move. The sender seals each chunk into a
// staging buffer; the receiver opens the chunk where it has arrived, in its
// final memory. The authentication tags of all chunks follow in one further
// chunk. A chunk's nonce is its tag, and the receiver never uses a tag twice.
std::shared_ptr<const Chunks> sealedChunks(
    base::TaskRunner& runner,
    std::string sendKey,
    std::string receiveKey);

// The part of a span that one chunk carries.
struct Chunk : base::ConstSpan {
  WhenFilled whenFilled; // null: the bytes are there
  uint64_t filledAt = 0; // by how many bytes of the span
};
std::vector<Chunk> toChunks(const Spans& spans, size_t bytes = kChunkBytes);
std::vector<base::MutableSpan> toChunks(
    const std::vector<base::MutableSpan>& spans,
    size_t bytes = kChunkBytes);

// Sends one chunk; the callback fires when it is not read any more.
using SendChunk = std::function<
    void(size_t track, uint64_t index, const Chunk& chunk, Callback callback)>;

// Sends chunks, at most `tracks` at a time: a track waits until the bytes of
// the next chunk are there, sends the chunk, and goes on when that is over.
// Ends as Chunks::send() does.
void sendInTracks(
    std::vector<Chunk> chunks,
    size_t tracks,
    SendChunk send,
    std::function<bool()> ended,
    Callback callback);

} // namespace torch_rpc_ext::transport::ucx::bulk
