#include "agent/lender.h"

#include "base/short_time_slices.h"
#include "base/streaming_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

namespace {

using Block = memory::BufferCache::Block;
using Blocks = std::vector<std::shared_ptr<Block>>;

// Each takes a block and a descriptor.
constexpr size_t kMaxSpans = 16;
// Up to here the thread that sends copies itself (8 MiB: under a millisecond).
constexpr uint64_t kAtOnceBytes = uint64_t{8} << 20;
// One core copies at about the speed of the memory.
constexpr uint64_t kBytesPerThread = uint64_t{64} << 20;
constexpr uint64_t kMaxCopyThreads = 4;
// From here on the receiver would not find it in a cache anyway.
constexpr uint64_t kStreamedBytes = uint64_t{32} << 20;
// What a thread takes at a time.
constexpr size_t kShareBytes = size_t{8} << 20;
// 20 us: after each the thread gives way to whoever woke up behind it.
constexpr size_t kPieceBytes = size_t{128} << 10;

// Shared by the threads that copy one message.
class Copy {
 public:
  Copy(Encoded encoded, Blocks blocks, bool streams, Lender::Then then)
      : encoded_(std::move(encoded)),
        blocks_(std::move(blocks)),
        streams_(streams),
        then_(std::move(then)) {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const auto* const from = static_cast<const char*>(encoded_.bulk[i].data);
      auto* const to = static_cast<char*>(blocks_[i]->data());
      const size_t size = encoded_.bulk[i].size;
      for (size_t at = 0; at < size; at += kShareBytes) {
        shares_.push_back(
            {to + at, from + at, std::min(kShareBytes, size - at)});
      }
    }
  }

  void setThreads(size_t threads) {
    threads_.store(threads);
  }

  // What each thread runs; `slices` are those of the thread, nullptr where it
  // has none.
  void work(base::ShortTimeSlices* slices) {
    for (size_t i = 0; (i = next_.fetch_add(1)) < shares_.size();) {
      const auto& [to, from, size] = shares_[i];
      for (size_t at = 0; at < size; at += kPieceBytes) {
        const size_t piece = std::min(kPieceBytes, size - at);
        if (streams_) {
          base::streamingCopy(to + at, from + at, piece);
        } else {
          std::memcpy(to + at, from + at, piece);
        }
        if (slices != nullptr) {
          slices->yield();
        }
      }
    }
    if (threads_.fetch_sub(1) == 1) {
      finish();
    }
  }

 private:
  struct Share {
    char* to;
    const char* from;
    size_t size;
  };

  void finish() {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      transport::BulkSpan& span = encoded_.bulk[i];
      span.data = blocks_[i]->data();
      span.map = {blocks_[i], blocks_[i]->shared()};
    }
    blocks_.clear(); // a block is free again as soon as it comes back
    encoded_.storages.clear();
    then_(std::move(encoded_));
  }

  Encoded encoded_;
  Blocks blocks_;
  const bool streams_; // past the caches
  const Lender::Then then_;
  std::vector<Share> shares_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> threads_{1};
};

// All, or none.
Blocks acquire(memory::BufferCache& cache, const Encoded& encoded) {
  Blocks blocks;
  if (encoded.mappable && encoded.bulk.size() <= kMaxSpans) {
    for (const auto& span : encoded.bulk) {
      auto block = cache.acquireShared(span.size);
      if (!block) {
        return {};
      }
      blocks.push_back(std::make_shared<Block>(std::move(*block)));
    }
  }
  return blocks;
}

} // namespace

void Lender::lend(Encoded encoded, Then then) {
  Blocks blocks = acquire(cache_, encoded);
  if (blocks.empty()) {
    then(std::move(encoded));
    return;
  }
  uint64_t bytes = 0;
  for (const auto& span : encoded.bulk) {
    bytes += span.size;
  }
  if (bytes <= kAtOnceBytes) {
    Copy(
        std::move(encoded),
        std::move(blocks),
        /*streams=*/false,
        std::move(then))
        .work(nullptr);
    return;
  }
  const auto copy = std::make_shared<Copy>(
      std::move(encoded),
      std::move(blocks),
      bytes >= kStreamedBytes,
      std::move(then));
  static const uint64_t cores =
      std::max(1u, std::thread::hardware_concurrency());
  const uint64_t threads = std::clamp<uint64_t>(
      bytes / kBytesPerThread, 1, std::min(cores, kMaxCopyThreads));
  copy->setThreads(threads);
  for (uint64_t i = 0; i < threads; ++i) {
    runner_.submit(base::makeTask([copy] {
      base::ShortTimeSlices slices;
      copy->work(&slices);
    }));
  }
}

} // namespace torch_rpc_ext::agent
