#include "transport/ucx/bulk/chunks.h"

#include "base/boundary.h"
#include "crypto/crypto.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
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
constexpr size_t kTracks = 4;

base::ConstSpan spanOf(const uint64_t& tag) {
  return {&tag, sizeof(tag)};
}

// Seals the chunks of one transfer, each track in a staging buffer of its own.
class Sealing : public std::enable_shared_from_this<Sealing> {
 public:
  Sealing(
      base::TaskRunner& runner,
      std::string key,
      std::shared_ptr<Channel> channel,
      const PullRequest& pull,
      std::function<bool()> ended)
      : runner_(runner),
        key_(std::move(key)),
        channel_(std::move(channel)),
        pull_(pull),
        ended_(std::move(ended)) {}

  void start(std::vector<Chunk> chunks, Callback callback) {
    tags_.resize(chunks.size() * crypto::kTagBytes);
    sendInTracks(
        std::move(chunks),
        kTracks,
        [self = shared_from_this()](
            size_t track, uint64_t index, const Chunk& chunk, Callback sent) {
          self->runner_.submit(
              base::makeTask(
                  [self, track, index, &chunk, sent = std::move(sent)] {
                    self->sealAndSend(self->tracks_[track], index, chunk, sent);
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
  struct Track {
    std::optional<crypto::Cipher> cipher; // made for the first chunk
    base::Buffer staging;
  };

  void sealAndSend(
      Track& track,
      uint64_t index,
      const Chunk& chunk,
      const Callback& sent) {
    if (const base::Error error = seal(track, index, chunk)) {
      sent(error);
    } else {
      send(index, {track.staging.data(), chunk.size}, sent);
    }
  }

  // Throws nothing: an exception becomes the error.
  base::Error seal(Track& track, uint64_t index, const Chunk& chunk) {
    const uint64_t tag = pull_.tag + index;
    try {
      if (!track.cipher) {
        track.cipher.emplace(key_);
      }
      if (track.staging.size() < chunk.size) {
        track.staging = base::Buffer(chunk.size);
      }
      return track.cipher->seal(
          tag,
          spanOf(tag),
          chunk,
          track.staging.data(),
          tags_.data() + index * crypto::kTagBytes);
    } catch (...) {
      return base::caught();
    }
  }

  void send(uint64_t index, base::ConstSpan bytes, const Callback& sent) {
    PullRequest pull = pull_;
    pull.tag += index;
    plainChunks()->send(channel_, pull, {BulkSpan{bytes}}, ended_, sent);
  }

  base::TaskRunner& runner_;
  const std::string key_;
  const std::shared_ptr<Channel> channel_;
  const PullRequest pull_;
  const std::function<bool()> ended_;
  std::array<Track, kTracks> tracks_;
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
    try {
      open();
    } catch (...) {
      fail(base::caught());
    }
    if (left_.fetch_sub(1) == 1) {
      callback_(error_);
    }
  }

  void open() {
    crypto::Cipher cipher(key_);
    for (uint64_t index = next_.fetch_add(1); index < chunks_.size();
         index = next_.fetch_add(1)) {
      const base::MutableSpan& chunk = chunks_[index];
      const uint64_t tag = firstTag_ + index;
      if (base::Error error = cipher.open(
              tag,
              spanOf(tag),
              {chunk.data, chunk.size},
              tags_.data() + index * crypto::kTagBytes,
              chunk.data)) {
        fail(std::move(error));
      }
    }
  }

  void fail(base::Error error) {
    if (!failed_.exchange(true)) {
      error_ = std::move(error);
    }
  }

  const std::string key_;
  const uint64_t firstTag_;
  const std::vector<base::MutableSpan> chunks_;
  std::vector<uint8_t> tags_;
  const Callback callback_;
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> left_{0}; // threads that have not ended
  std::atomic<bool> failed_{false};
  base::Error error_; // the first; read when the last thread ends
};

class SealedChunks final : public Chunks {
 public:
  SealedChunks(
      base::TaskRunner& runner,
      std::string sendKey,
      std::string receiveKey)
      : runner_(runner),
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
    return plainChunks()->receive(
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
        runner_, sendKey_, channel, pull, std::move(ended))
        ->start(toChunks(spans, kSealedBytes), std::move(callback));
  }

 private:
  base::TaskRunner& runner_;
  const std::string sendKey_;
  const std::string receiveKey_;
};

} // namespace

std::shared_ptr<const Chunks> sealedChunks(
    base::TaskRunner& runner,
    std::string sendKey,
    std::string receiveKey) {
  return std::make_shared<const SealedChunks>(
      runner, std::move(sendKey), std::move(receiveKey));
}

} // namespace torch_rpc_ext::transport::ucx::bulk
