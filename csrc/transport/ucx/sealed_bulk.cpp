#include "transport/ucx/sealed_bulk.h"

#include "crypto/crypto.h"
#include "transport/ucx/bulk_chunks.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// How many staging buffers a transfer has: one is filled while another is sent.
constexpr uint64_t kLanes = 2;

std::vector<base::MutableSpan> chunksOf(
    const std::vector<base::MutableSpan>& spans) {
  std::vector<base::MutableSpan> chunks;
  for (const auto& span : spans) {
    auto* const begin = static_cast<char*>(span.data);
    for (size_t at = 0; at < span.size; at += kChunkBytes) {
      chunks.push_back({begin + at, std::min(kChunkBytes, span.size - at)});
    }
  }
  return chunks;
}

base::ConstSpan spanOf(const uint64_t& tag) {
  return {&tag, sizeof(tag)};
}

// Sends one transfer with several lanes. Each lane waits until the bytes of its
// next chunk are there, seals and sends the chunk, and goes on when UCX does
// not read the lane's staging buffer any more.
class Sending : public std::enable_shared_from_this<Sending> {
 public:
  Sending(
      std::shared_ptr<BulkChannel> bulk,
      base::TaskRunner& runner,
      std::string key,
      PullRequest pull,
      const std::vector<BulkSpan>& spans,
      Callback callback)
      : bulk_(std::move(bulk)),
        runner_(runner),
        key_(std::move(key)),
        pull_(std::move(pull)),
        chunks_(toChunks(spans)),
        tags_(chunks_.size() * crypto::kTagBytes),
        callback_(std::move(callback)) {}

  void start() {
    if (chunks_.empty()) {
      callback_({});
      return;
    }
    const uint64_t lanes = std::min<uint64_t>(kLanes, chunks_.size());
    left_.store(lanes);
    for (uint64_t i = 0; i < lanes; ++i) {
      auto lane = std::make_shared<Lane>(key_);
      runner_.submit(base::makeTask([self = shared_from_this(), lane] {
        self->work(lane);
      }));
    }
  }

 private:
  struct Lane {
    explicit Lane(const std::string& key) : cipher(key) {}
    crypto::Cipher cipher;
    base::Buffer staging;
  };

  void work(const std::shared_ptr<Lane>& lane) {
    const uint64_t index = next_.fetch_add(1);
    if (index >= chunks_.size() || failed_.load()) {
      laneEnds();
      return;
    }
    const Chunk& chunk = chunks_[index];
    if (chunk.filling == nullptr) {
      sealAndSend(lane, index);
      return;
    }
    chunk.filling->whenFilled(
        chunk.filledAt,
        [self = shared_from_this(), lane, index](const base::Error& error) {
          if (error) {
            self->fail(error);
            self->laneEnds();
            return;
          }
          self->runner_.submit(base::makeTask([self, lane, index] {
            self->sealAndSend(lane, index);
          }));
        });
  }

  void sealAndSend(const std::shared_ptr<Lane>& lane, uint64_t index) {
    const Chunk& chunk = chunks_[index];
    const uint64_t tag = pull_.tag + index;
    try {
      if (lane->staging.size() < chunk.size) {
        lane->staging = base::Buffer(chunk.size);
      }
    } catch (const std::bad_alloc&) {
      fail({base::ErrorKind::kOverloaded, "no memory to encrypt bulk"});
      laneEnds();
      return;
    }
    if (base::Error error = lane->cipher.seal(
            tag,
            spanOf(tag),
            chunk,
            lane->staging.data(),
            tags_.data() + index * crypto::kTagBytes)) {
      fail(std::move(error));
      laneEnds();
      return;
    }
    bulk_->send(
        pull_.bulkAddress,
        tag,
        {{lane->staging.data(), chunk.size}},
        [self = shared_from_this(), lane](const base::Error& error) {
          if (error) {
            self->fail(error);
          }
          self->runner_.submit(
              base::makeTask([self, lane] { self->work(lane); }));
        });
  }

  void laneEnds() {
    if (left_.fetch_sub(1) != 1) {
      return;
    }
    if (failed_.load()) {
      callback_(error_);
      return;
    }
    bulk_->send(
        pull_.bulkAddress,
        pull_.tag + chunks_.size(),
        {{tags_.data(), tags_.size()}},
        [self = shared_from_this()](const base::Error& error) {
          self->callback_(error);
        });
  }

  void fail(base::Error error) {
    std::lock_guard lock(mutex_);
    if (!failed_.load()) {
      error_ = std::move(error);
      failed_.store(true);
    }
  }

  const std::shared_ptr<BulkChannel> bulk_;
  base::TaskRunner& runner_;
  const std::string key_;
  const PullRequest pull_;
  const std::vector<Chunk> chunks_;
  std::vector<uint8_t> tags_;
  const Callback callback_;
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> left_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  base::Error error_;
};

// Opens the chunks of one transfer, on several threads.
class Opening : public std::enable_shared_from_this<Opening> {
 public:
  Opening(
      std::string key,
      uint64_t firstTag,
      const std::vector<base::MutableSpan>& into,
      Callback callback)
      : key_(std::move(key)),
        firstTag_(firstTag),
        chunks_(chunksOf(into)),
        tags_(chunks_.size() * crypto::kTagBytes),
        callback_(std::move(callback)) {}

  base::MutableSpan tags() {
    return {tags_.data(), tags_.size()};
  }

  void start(base::TaskRunner& runner) {
    if (chunks_.empty()) {
      callback_({});
      return;
    }
    const uint64_t threads = std::clamp<uint64_t>(
        std::thread::hardware_concurrency(), 1, chunks_.size());
    left_.store(threads);
    for (uint64_t i = 0; i < threads; ++i) {
      runner.submit(
          base::makeTask([self = shared_from_this()] { self->work(); }));
    }
  }

  void end(const base::Error& error) {
    callback_(error);
  }

 private:
  void work() {
    crypto::Cipher cipher(key_);
    for (uint64_t index = next_.fetch_add(1); index < chunks_.size();
         index = next_.fetch_add(1)) {
      const base::MutableSpan& chunk = chunks_[index];
      const uint64_t tag = firstTag_ + index;
      base::Error error = cipher.open(
          tag,
          spanOf(tag),
          {chunk.data, chunk.size},
          tags_.data() + index * crypto::kTagBytes,
          chunk.data);
      if (error) {
        std::lock_guard lock(mutex_);
        error_ = std::move(error);
      }
    }
    if (left_.fetch_sub(1) == 1) {
      callback_(error_);
    }
  }

  const std::string key_;
  const uint64_t firstTag_;
  const std::vector<base::MutableSpan> chunks_;
  std::vector<uint8_t> tags_;
  const Callback callback_;
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> left_{0};
  std::mutex mutex_;
  base::Error error_;
};

} // namespace

void sendSealed(
    std::shared_ptr<BulkChannel> bulk,
    base::TaskRunner& runner,
    std::string key,
    const PullRequest& pull,
    const std::vector<BulkSpan>& spans,
    Callback callback) {
  auto sending = std::make_shared<Sending>(
      std::move(bulk),
      runner,
      std::move(key),
      pull,
      spans,
      std::move(callback));
  sending->start();
}

uint64_t receiveSealed(
    BulkChannel& bulk,
    base::TaskRunner& runner,
    std::string key,
    uint64_t firstTag,
    std::vector<base::MutableSpan> into,
    Callback callback) {
  auto opening = std::make_shared<Opening>(
      std::move(key), firstTag, into, std::move(callback));
  into.push_back(opening->tags());
  return bulk.receive(
      firstTag,
      std::move(into),
      [opening, &runner](const base::Error& error) {
        if (error) {
          opening->end(error);
        } else {
          opening->start(runner);
        }
      },
      /*arrived=*/nullptr); // a chunk is of no use before it is opened
}

uint64_t sealedChunkCount(const std::vector<base::MutableSpan>& into) {
  uint64_t chunks = 0;
  for (const auto& span : into) {
    chunks += chunkCount(span.size);
  }
  return chunks + chunkCount(chunks * crypto::kTagBytes);
}

} // namespace torch_rpc_ext::transport::ucx
