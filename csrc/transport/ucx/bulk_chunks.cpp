#include "transport/ucx/bulk_chunks.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// Sends the chunks of one transfer, and counts them as they end.
class Feeding : public std::enable_shared_from_this<Feeding> {
 public:
  Feeding(
      std::shared_ptr<BulkChannel> bulk,
      PullRequest pull,
      std::vector<Chunk> chunks,
      std::function<bool()> ended,
      Callback callback)
      : bulk_(std::move(bulk)),
        pull_(std::move(pull)),
        chunks_(std::move(chunks)),
        ended_(std::move(ended)),
        callback_(std::move(callback)),
        left_(chunks_.size() + 1) {}

  void start() {
    for (size_t i = 0; i < chunks_.size(); ++i) {
      if (chunks_[i].filling == nullptr) {
        sendChunk(i);
        continue;
      }
      chunks_[i].filling->whenFilled(
          chunks_[i].filledAt,
          [self = shared_from_this(), i](const base::Error& error) {
            if (error) {
              self->chunkEnds(error);
            } else {
              self->sendChunk(i);
            }
          });
    }
    chunkEnds({});
  }

 private:
  void sendChunk(size_t index) {
    if (failed_.load()) {
      chunkEnds({});
    } else if (ended_()) {
      chunkEnds(
          {base::ErrorKind::kPeerLost,
           "the connection ended while a message was on its way"});
    } else {
      bulk_->send(
          pull_.bulkAddress,
          pull_.tag + index,
          {chunks_[index]},
          [self = shared_from_this()](const base::Error& error) {
            self->chunkEnds(error);
          });
    }
  }

  void chunkEnds(const base::Error& error) {
    if (error) {
      std::lock_guard lock(mutex_);
      if (!failed_.load()) {
        error_ = error;
        failed_.store(true);
      }
    }
    if (left_.fetch_sub(1) == 1) {
      callback_(error_);
    }
  }

  const std::shared_ptr<BulkChannel> bulk_;
  const PullRequest pull_;
  const std::vector<Chunk> chunks_;
  const std::function<bool()> ended_;
  const Callback callback_;
  std::atomic<size_t> left_; // chunks not yet ended, plus 1 for start()
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  base::Error error_; // final when the last chunk ends
};

} // namespace

std::vector<Chunk> toChunks(const std::vector<BulkSpan>& spans) {
  std::vector<Chunk> chunks;
  for (const BulkSpan& span : spans) {
    const auto* const begin = static_cast<const char*>(span.data);
    for (size_t at = 0; at < span.size; at += kChunkBytes) {
      const size_t size = std::min(kChunkBytes, span.size - at);
      chunks.push_back(
          {{begin + at, size}, span.filling, span.fillingOffset + at + size});
    }
  }
  return chunks;
}

bool anyFilling(const std::vector<BulkSpan>& spans) {
  return std::any_of(spans.begin(), spans.end(), [](const BulkSpan& span) {
    return span.filling != nullptr;
  });
}

void sendAsFilled(
    std::shared_ptr<BulkChannel> bulk,
    const PullRequest& pull,
    const std::vector<BulkSpan>& spans,
    std::function<bool()> ended,
    Callback callback) {
  std::make_shared<Feeding>(
      std::move(bulk),
      pull,
      toChunks(spans),
      std::move(ended),
      std::move(callback))
      ->start();
}

} // namespace torch_rpc_ext::transport::ucx
