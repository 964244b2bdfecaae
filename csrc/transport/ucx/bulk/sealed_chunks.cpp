#include "transport/ucx/bulk/chunks.h"

#include "crypto/crypto.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

// A transfer is encrypted in parts of this size, so that several threads work
// on it, and the first part is on its way while the next is being encrypted.
constexpr size_t kSealedBytes = 1u << 20;
// How many staging buffers a transfer has: some are filled while others are
// sent.
constexpr size_t kLanes = 4;

base::ConstSpan spanOf(const uint64_t& tag) {
  return {&tag, sizeof(tag)};
}

// Seals the chunks of one transfer, each lane in a staging buffer of its own.
class Sealing : public std::enable_shared_from_this<Sealing> {
 public:
  Sealing(
      std::shared_ptr<const Chunks> inner,
      base::TaskRunner& runner,
      const std::string& key,
      std::shared_ptr<Channel> channel,
      const PullRequest& pull,
      std::function<bool()> ended)
      : inner_(std::move(inner)),
        runner_(runner),
        channel_(std::move(channel)),
        pull_(pull),
        ended_(std::move(ended)) {
    for (auto& lane : lanes_) {
      lane.cipher.emplace(key);
    }
  }

  void start(std::vector<Chunk> chunks, Callback callback) {
    tags_.resize(chunks.size() * crypto::kTagBytes);
    sendInLanes(
        std::move(chunks),
        kLanes,
        [self = shared_from_this()](
            size_t lane, uint64_t index, const Chunk& chunk, Callback sent) {
          self->runner_.submit(
              base::makeTask(
                  [self, lane, index, &chunk, sent = std::move(sent)] {
                    self->sealAndSend(self->lanes_[lane], index, chunk, sent);
                  }));
        },
        ended_,
        [self = shared_from_this(),
         callback = std::move(callback)](const base::Error& error) {
          if (error || self->tags_.empty()) {
            callback(error);
          } else {
            self->send(
                self->tags_.size() / crypto::kTagBytes,
                {self->tags_.data(), self->tags_.size()},
                // Holds the tags until the channel does not read them any more.
                [self, callback](const base::Error& why) { callback(why); });
          }
        });
  }

 private:
  struct Lane {
    std::optional<crypto::Cipher> cipher;
    base::Buffer staging;
  };

  void sealAndSend(
      Lane& lane,
      uint64_t index,
      const Chunk& chunk,
      const Callback& sent) {
    const uint64_t tag = pull_.tag + index;
    try {
      if (lane.staging.size() < chunk.size) {
        lane.staging = base::Buffer(chunk.size);
      }
    } catch (const std::bad_alloc&) {
      sent({base::ErrorKind::kOverloaded, "no memory to encrypt bulk"});
      return;
    }
    if (base::Error error = lane.cipher->seal(
            tag,
            spanOf(tag),
            chunk,
            lane.staging.data(),
            tags_.data() + index * crypto::kTagBytes)) {
      sent(error);
      return;
    }
    send(index, {lane.staging.data(), chunk.size}, sent);
  }

  void send(uint64_t index, base::ConstSpan bytes, const Callback& sent) {
    PullRequest pull = pull_;
    pull.tag += index;
    inner_->send(channel_, pull, {BulkSpan{bytes}}, ended_, sent);
  }

  const std::shared_ptr<const Chunks> inner_;
  base::TaskRunner& runner_;
  const std::shared_ptr<Channel> channel_;
  const PullRequest pull_;
  const std::function<bool()> ended_;
  std::array<Lane, kLanes> lanes_;
  std::vector<uint8_t> tags_;
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
        chunks_(toChunks(into, kSealedBytes)),
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

class SealedChunks final : public Chunks {
 public:
  SealedChunks(
      std::shared_ptr<const Chunks> inner,
      base::TaskRunner& runner,
      std::string sendKey,
      std::string receiveKey)
      : inner_(std::move(inner)),
        runner_(runner),
        sendKey_(std::move(sendKey)),
        receiveKey_(std::move(receiveKey)) {}

  uint64_t tagsFor(const std::vector<base::MutableSpan>& into) const override {
    const uint64_t chunks = toChunks(into, kSealedBytes).size();
    return chunks + chunkCount(chunks * crypto::kTagBytes);
  }

  uint64_t receive(
      Channel& channel,
      uint64_t firstTag,
      std::vector<base::MutableSpan> into,
      Callback callback,
      Incoming::Arrived /*arrived*/) const override {
    auto opening = std::make_shared<Opening>(
        receiveKey_, firstTag, into, std::move(callback));
    into = toChunks(into, kSealedBytes);
    into.push_back(opening->tags());
    return inner_->receive(
        channel,
        firstTag,
        std::move(into),
        [opening, &runner = runner_](const base::Error& error) {
          if (error) {
            opening->end(error);
          } else {
            opening->start(runner);
          }
        },
        /*arrived=*/nullptr); // a chunk is of no use before it is opened
  }

  void send(
      const std::shared_ptr<Channel>& channel,
      const PullRequest& pull,
      const Spans& spans,
      std::function<bool()> ended,
      Callback callback) const override {
    std::make_shared<Sealing>(
        inner_, runner_, sendKey_, channel, pull, std::move(ended))
        ->start(toChunks(spans, kSealedBytes), std::move(callback));
  }

 private:
  const std::shared_ptr<const Chunks> inner_;
  base::TaskRunner& runner_;
  const std::string sendKey_;
  const std::string receiveKey_;
};

} // namespace

std::shared_ptr<const Chunks> sealedChunks(
    std::shared_ptr<const Chunks> inner,
    base::TaskRunner& runner,
    std::string sendKey,
    std::string receiveKey) {
  return std::make_shared<const SealedChunks>(
      std::move(inner), runner, std::move(sendKey), std::move(receiveKey));
}

} // namespace torch_rpc_ext::transport::ucx::bulk
