#include "transport/ucx/bulk/chunks.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

// See sendInTracks().
class Tracks : public std::enable_shared_from_this<Tracks> {
 public:
  Tracks(
      std::vector<Chunk> chunks,
      size_t tracks,
      SendChunk send,
      std::function<bool()> ended,
      Callback callback)
      : chunks_(std::move(chunks)),
        send_(std::move(send)),
        ended_(std::move(ended)),
        callback_(std::move(callback)),
        left_(tracks) {}

  // Sends the next chunk on this track, then the one after that, until there is
  // none.
  void next(size_t track) {
    const uint64_t index = next_.fetch_add(1);
    if (index >= chunks_.size() || failed_.load()) {
      if (left_.fetch_sub(1) == 1) {
        callback_(error_);
      }
      return;
    }
    const auto send = [self = shared_from_this(), track, index](
                          const base::Error& error) {
      if (error || self->failed_.load()) {
        self->sent(track, error);
      } else if (self->ended_()) {
        self->sent(
            track,
            {base::ErrorKind::kPeerLost,
             "the connection ended while a message was on its way"});
      } else {
        self->send_(
            track, index, self->chunks_[index], [self, track](const auto& why) {
              self->sent(track, why);
            });
      }
    };
    const Chunk& chunk = chunks_[index];
    chunk.whenFilled ? chunk.whenFilled(chunk.filledAt, send) : send({});
  }

 private:
  void sent(size_t track, const base::Error& error) {
    if (error && !failed_.exchange(true)) {
      error_ = error;
    }
    next(track);
  }

  const std::vector<Chunk> chunks_;
  const SendChunk send_;
  const std::function<bool()> ended_;
  const Callback callback_;
  std::atomic<uint64_t> next_{0};
  std::atomic<size_t> left_; // tracks that have not ended
  std::atomic<bool> failed_{false};
  base::Error error_; // the first; read when the last track ends
};

class PlainChunks final : public Chunks {
 public:
  uint64_t tagsFor(const std::vector<base::MutableSpan>& into) const override {
    uint64_t chunks = 0;
    for (const auto& span : into) {
      chunks += chunkCount(span.size);
    }
    return chunks;
  }

  uint64_t receive(
      Channel& channel,
      uint64_t firstTag,
      std::vector<base::MutableSpan> into,
      Callback callback,
      Incoming::Arrived arrived) const override {
    return channel.receive(
        firstTag, toChunks(into), std::move(callback), std::move(arrived));
  }

  void send(
      const std::shared_ptr<Channel>& channel,
      const PullRequest& pull,
      const Spans& spans,
      std::function<bool()> ended,
      Callback callback) const override {
    const bool filled =
        std::all_of(spans.begin(), spans.end(), [](const BulkSpan& span) {
          return span.whenFilled == nullptr;
        });
    auto chunks = toChunks(spans);
    if (filled) {
      channel->send(
          pull.bulkAddress,
          pull.tag,
          {chunks.begin(), chunks.end()},
          std::move(callback));
      return;
    }
    const size_t tracks = chunks.size();
    sendInTracks(
        std::move(chunks),
        tracks,
        [channel, pull](
            size_t, uint64_t index, const Chunk& chunk, Callback sent) {
          channel->send(
              pull.bulkAddress, pull.tag + index, {chunk}, std::move(sent));
        },
        std::move(ended),
        std::move(callback));
  }
};

} // namespace

std::shared_ptr<const Chunks> plainChunks() {
  static const auto chunks = std::make_shared<const PlainChunks>();
  return chunks;
}

void sendInTracks(
    std::vector<Chunk> chunks,
    size_t tracks,
    SendChunk send,
    std::function<bool()> ended,
    Callback callback) {
  if (chunks.empty()) {
    callback({});
    return;
  }
  const size_t count = std::min(tracks, chunks.size());
  const auto sending = std::make_shared<Tracks>(
      std::move(chunks),
      count,
      std::move(send),
      std::move(ended),
      std::move(callback));
  for (size_t track = 0; track < count; ++track) {
    sending->next(track);
  }
}

std::vector<Chunk> toChunks(const Spans& spans, size_t bytes) {
  std::vector<Chunk> chunks;
  for (const BulkSpan& span : spans) {
    const auto* const begin = static_cast<const char*>(span.data);
    for (size_t at = 0; at < span.size; at += bytes) {
      const size_t size = std::min(bytes, span.size - at);
      chunks.push_back({{begin + at, size}, span.whenFilled, at + size});
    }
  }
  return chunks;
}

std::vector<base::MutableSpan> toChunks(
    const std::vector<base::MutableSpan>& spans,
    size_t bytes) {
  std::vector<base::MutableSpan> chunks;
  for (const auto& span : spans) {
    auto* const begin = static_cast<char*>(span.data);
    for (size_t at = 0; at < span.size; at += bytes) {
      chunks.push_back({begin + at, std::min(bytes, span.size - at)});
    }
  }
  return chunks;
}

} // namespace torch_rpc_ext::transport::ucx::bulk
