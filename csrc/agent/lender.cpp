#include "agent/lender.h"

#include "base/short_time_slices.h"
#include "base/streaming_copy.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
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
// How fast the kernel fills fresh pages: about 1 GB/s.
constexpr uint64_t kFreshBytesPerMicrosecond = 1000;
// How long messages wait without a block coming back, at least and at most.
constexpr std::chrono::microseconds kLeastPatience{1'000};
constexpr std::chrono::microseconds kMostPatience{200'000};
// 20 us: after each the thread gives way to whoever woke up behind it.
constexpr size_t kPieceBytes = size_t{128} << 10;

// Shared by the threads that fill some blocks.
class Copy {
 public:
  // `done` runs on the thread that ends last.
  Copy(
      const std::vector<Lender::Source>& sources,
      bool streams,
      base::TaskPtr done)
      : streams_(streams), done_(std::move(done)) {
    for (const Lender::Source& source : sources) {
      const auto* const from = static_cast<const char*>(source.bytes);
      auto* const to = static_cast<char*>(source.block->data());
      const size_t size = source.block->size();
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
      done_->run();
    }
  }

 private:
  struct Share {
    char* to;
    const char* from;
    size_t size;
  };

  const bool streams_; // past the caches
  const base::TaskPtr done_;
  std::vector<Share> shares_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> threads_{1};
};

// The bulk has been copied to the blocks: they are what is sent.
void sendBlocks(
    Encoded encoded,
    Blocks blocks,
    const std::vector<bool>& areCommon,
    const Lender::Then& then) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    transport::BulkSpan& span = encoded.bulk[i];
    span.data = blocks[i]->data();
    span.map = {blocks[i], blocks[i]->shared()};
    span.isCommon = !areCommon.empty() && areCommon[i];
  }
  blocks.clear(); // a block is free again as soon as it comes back
  encoded.storages.clear();
  then(std::move(encoded));
}

// While this thread takes blocks: what it gives back because a message needs
// more than there are has not been in use.
thread_local bool acquiring = false;

// All, or none.
Blocks acquire(
    memory::BufferCache& cache,
    const std::vector<base::ConstSpan>& spans) {
  acquiring = true;
  struct Done {
    ~Done() {
      acquiring = false;
    }
  } done; // destroyed after `blocks`
  Blocks blocks;
  for (const auto& span : spans) {
    auto block = cache.acquireShared(span.size);
    if (!block) {
      return {};
    }
    blocks.push_back(std::make_shared<Block>(std::move(*block)));
  }
  return blocks;
}

// The time in which the kernel would fill as many fresh pages.
std::chrono::microseconds patienceFor(uint64_t bytes) {
  return std::clamp(
      std::chrono::microseconds(bytes / kFreshBytesPerMicrosecond),
      kLeastPatience,
      kMostPatience);
}

size_t classOf(const Encoded& encoded) {
  size_t largest = 0;
  for (const auto& span : encoded.bulk) {
    largest = std::max<size_t>(largest, span.size);
  }
  return memory::sizeClass(largest);
}

} // namespace

Lender::Lender(
    std::shared_ptr<memory::BufferCache> cache,
    base::TaskRunner& runner,
    base::Poller& poller)
    : cache_(std::move(cache)),
      runner_(runner),
      timer_(poller, [this] { expire(); }) {}

std::shared_ptr<Lender> Lender::create(
    std::shared_ptr<memory::BufferCache> cache,
    base::TaskRunner& runner,
    base::Poller& poller) {
  std::shared_ptr<Lender> lender(new Lender(std::move(cache), runner, poller));
  lender->cache_->onReturn(
      [weak = std::weak_ptr(lender)](size_t capacity, bool isIdle) {
        if (const auto self = weak.lock()) {
          self->returned(capacity, isIdle);
        }
      });
  return lender;
}

void Lender::lend(Encoded encoded, Then then) {
  if (!encoded.mappable || encoded.bulk.size() > kMaxSpans) {
    then(std::move(encoded));
    return;
  }
  if (OneCopy* const common = OneCopy::current()) {
    lendCommon(*common, std::move(encoded), std::move(then));
    return;
  }
  uint64_t bytes = 0;
  for (const auto& span : encoded.bulk) {
    bytes += span.size;
  }
  if (anyWaits_.load()) {
    const size_t capacity = classOf(encoded);
    std::unique_lock lock(mutex_);
    if (queues_.contains(capacity)) { // others wait already
      addLocked(capacity, std::move(encoded), std::move(then), bytes);
      return;
    }
  }
  if (tryToLend(encoded, then, bytes)) {
    return;
  }
  {
    const size_t capacity = classOf(encoded);
    const std::lock_guard lock(mutex_);
    if (!stopped_ && !stalled_.contains(capacity)) {
      addLocked(capacity, std::move(encoded), std::move(then), bytes);
      return;
    }
  }
  then(std::move(encoded));
}

bool Lender::tryToLend(Encoded& encoded, Then& then, uint64_t bytes) {
  Blocks blocks = acquire(*cache_, {encoded.bulk.begin(), encoded.bulk.end()});
  if (blocks.empty()) {
    return false;
  }
  std::vector<Source> sources;
  for (size_t i = 0; i < blocks.size(); ++i) {
    sources.push_back({blocks[i], encoded.bulk[i].data});
  }
  copy(
      sources,
      bytes,
      base::makeTask([encoded = std::move(encoded),
                      blocks = std::move(blocks),
                      then = std::move(then)]() mutable {
        sendBlocks(std::move(encoded), std::move(blocks), {}, then);
      }));
  return true;
}

void Lender::copy(
    const std::vector<Source>& sources,
    uint64_t bytes,
    base::TaskPtr done) {
  if (bytes <= kAtOnceBytes) {
    Copy(sources, /*streams=*/false, std::move(done)).work(nullptr);
    return;
  }
  const auto copy =
      std::make_shared<Copy>(sources, bytes >= kStreamedBytes, std::move(done));
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

// A message whose copies are also those of other messages. It does not wait for
// memory: the messages after it would have to wait, too.
void Lender::lendCommon(OneCopy& common, Encoded encoded, Then then) {
  std::vector<base::ConstSpan> missing;
  for (const auto& span : encoded.bulk) {
    if (common.find(span) == nullptr) {
      missing.push_back(span);
    }
  }
  const Blocks blocks = acquire(*cache_, missing);
  if (blocks.size() != missing.size()) {
    then(std::move(encoded));
    return;
  }
  std::vector<std::shared_ptr<Loan>> made;
  std::vector<Source> sources;
  uint64_t bytes = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    made.push_back(
        std::make_shared<Loan>(
            missing[i], blocks[i], common.shares(missing[i])));
    sources.push_back({blocks[i], missing[i].data});
    bytes += missing[i].size;
  }
  common.add(made, encoded.storages);

  struct Message {
    Encoded encoded;
    Then then;
    std::vector<std::shared_ptr<Loan>> loans = {};
    std::atomic<size_t> left{0};

    void oneCopied() {
      if (left.fetch_sub(1) == 1) {
        Blocks blocks;
        std::vector<bool> areCommon;
        for (const auto& loan : loans) {
          blocks.push_back(loan->block());
          areCommon.push_back(loan->isCommon);
        }
        sendBlocks(std::move(encoded), std::move(blocks), areCommon, then);
      }
    }
  };
  const auto message =
      std::make_shared<Message>(std::move(encoded), std::move(then));
  auto next = made.begin();
  for (const auto& span : message->encoded.bulk) {
    const bool isMade = next != made.end() && (*next)->from().data == span.data;
    message->loans.push_back(isMade ? *next++ : common.find(span));
  }
  message->left.store(message->loans.size());
  if (!made.empty()) {
    copy(sources, bytes, base::makeTask([made] {
           for (const auto& loan : made) {
             loan->copied();
           }
         }));
  }
  // A copy of the list: the last oneCopied() sends the message.
  for (const auto& loan : std::vector(message->loans)) {
    loan->whenCopied(base::makeTask([message] { message->oneCopied(); }));
  }
}

void Lender::addLocked(
    size_t capacity,
    Encoded encoded,
    Then then,
    uint64_t bytes) {
  const auto [queue, isNew] = queues_.try_emplace(capacity);
  queue->second.messages.push_back(
      {std::move(encoded), std::move(then), bytes});
  ++load_.messages;
  load_.bytes += bytes;
  if (isNew) {
    queue->second.since = Clock::now();
    setAnyWaitsLocked();
    setTimerLocked();
  }
}

Lender::Clock::time_point Lender::Queue::until() const {
  return since + patienceFor(messages.front().bytes);
}

// Runs where a block has been given back, maybe in the middle of user code: so
// a task does the rest.
void Lender::returned(size_t capacity, bool isIdle) {
  if (!anyWaits_.load() || acquiring) {
    return;
  }
  const std::lock_guard lock(mutex_);
  stalled_.erase(capacity);
  setAnyWaitsLocked();
  const auto queue = queues_.find(capacity);
  if (queue != queues_.end()) {
    queue->second.since = Clock::now();
    // With the mutex held: after stop() nothing is submitted.
    runner_.submit(
        base::makeTask([self = shared_from_this(), capacity, isIdle] {
          self->serve(capacity, isIdle);
        }));
  }
}

// Lends to the first message of the queue, and to more if there are blocks. If
// a block came back that this process uses now, and there is no other one, the
// first message is sent without a copy: it would wait for a receiver that
// returns what it is sent.
void Lender::serve(size_t capacity, bool isIdle) {
  for (;;) {
    std::optional<Waiting> first;
    {
      const std::lock_guard lock(mutex_);
      const auto queue = queues_.find(capacity);
      if (queue == queues_.end()) {
        return;
      }
      first.emplace(takeFirstLocked(queue));
    }
    if (tryToLend(first->encoded, first->then, first->bytes)) {
      continue;
    }
    if (!isIdle) {
      first->then(std::move(first->encoded));
      return;
    }
    const std::lock_guard lock(mutex_);
    if (!stopped_) {
      putBackLocked(capacity, std::move(*first));
    }
    return;
  }
}

Lender::Waiting Lender::takeFirstLocked(Queues::iterator queue) {
  auto& messages = queue->second.messages;
  Waiting first = std::move(messages.front());
  messages.pop_front();
  --load_.messages;
  load_.bytes -= first.bytes;
  if (messages.empty()) {
    queues_.erase(queue);
    setAnyWaitsLocked();
  }
  return first;
}

void Lender::putBackLocked(size_t capacity, Waiting first) {
  const auto [queue, isNew] = queues_.try_emplace(capacity);
  ++load_.messages;
  load_.bytes += first.bytes;
  queue->second.messages.push_front(std::move(first));
  if (isNew) {
    queue->second.since = Clock::now();
    setAnyWaitsLocked();
    setTimerLocked();
  }
}

void Lender::expire() {
  std::vector<Waiting> expired;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    for (auto queue = queues_.begin(); queue != queues_.end();) {
      const auto following = std::next(queue);
      if (queue->second.until() <= now) {
        stalled_.insert(queue->first);
        for (size_t left = queue->second.messages.size(); left != 0; --left) {
          expired.push_back(takeFirstLocked(queue));
        }
      }
      queue = following;
    }
    setAnyWaitsLocked();
    setTimerLocked();
  }
  for (auto& waiting : expired) {
    waiting.then(std::move(waiting.encoded));
  }
}

void Lender::setAnyWaitsLocked() {
  anyWaits_.store(!queues_.empty() || !stalled_.empty());
}

void Lender::setTimerLocked() {
  auto first = Clock::time_point::max();
  for (const auto& [capacity, queue] : queues_) {
    first = std::min(first, queue.until());
  }
  timer_.set(first);
}

void Lender::stop() {
  Queues dropped; // destroyed without the lock: holds tensors
  timer_.stop();
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  dropped.swap(queues_);
  load_ = {};
  setAnyWaitsLocked();
}

Lender::Load Lender::waiting() const {
  const std::lock_guard lock(mutex_);
  return load_;
}

} // namespace torch_rpc_ext::agent
