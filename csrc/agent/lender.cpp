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

// A message with more spans is not lent: each span takes a block and a
// descriptor.
constexpr size_t kMaxSpans = 16;
// The sending thread copies up to so many bytes itself (8 MiB: under a
// millisecond); tasks copy more.
constexpr uint64_t kAtOnceBytes = uint64_t{8} << 20;
// A copy gets one more thread for so many bytes: one core alone copies at about
// the speed of the memory.
constexpr uint64_t kBytesPerThread = uint64_t{64} << 20;
constexpr uint64_t kMaxCopyThreads = 4;
// Copies of so many bytes or more go past the CPU's caches, which could not
// hold them until the receiver reads them.
constexpr uint64_t kStreamedBytes = uint64_t{32} << 20;
// How much of a copy a thread takes at a time.
constexpr size_t kShareBytes = size_t{8} << 20;
// How fast the kernel fills fresh pages: about 1 GB/s.
constexpr uint64_t kFreshBytesPerMicrosecond = 1000;
// How long messages wait without a block coming back, at least and at most.
constexpr std::chrono::microseconds kLeastPatience{1'000};
constexpr std::chrono::microseconds kMostPatience{200'000};
// After each piece (20 us) a copying thread yields to threads that have become
// ready meanwhile on its core.
constexpr size_t kPieceBytes = size_t{128} << 10;

// A block, and the bytes that it is filled with.
struct Source {
  std::shared_ptr<Block> block;
  const void* bytes;
};

// Shared by the threads that fill some blocks.
class Copy {
 public:
  // `done` runs on the thread that ends last.
  Copy(const std::vector<Source>& sources, bool streams, base::TaskPtr done)
      : streams_(streams), done_(std::move(done)) {
    for (const Source& source : sources) {
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

  const bool streams_; // past the CPU's caches
  const base::TaskPtr done_;
  std::vector<Share> shares_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> threads_{1};
};

// Fills the blocks of `sources`, with `bytes` in all: at once, or in tasks of
// `runner`. Then runs `done`.
void fillBlocks(
    const std::vector<Source>& sources,
    uint64_t bytes,
    base::TaskRunner& runner,
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
    runner.submit(base::makeTask([copy] {
      base::ShortTimeSlices slices;
      copy->work(&slices);
    }));
  }
}

// Sends a message with the blocks to which its bulk has been copied, in place
// of the bulk.
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

// Whether this thread is taking blocks. Blocks that it gives back meanwhile,
// because there are fewer than the message needs, were idle before too, so
// Lender::returned() ignores them.
thread_local bool acquiring = false;

// A block for each span; none at all if there is not one for each.
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

// How long a message of so many bytes waits: as long as the kernel would take
// to fill as many fresh pages.
std::chrono::microseconds patienceFor(uint64_t bytes) {
  return std::clamp(
      std::chrono::microseconds(bytes / kFreshBytesPerMicrosecond),
      kLeastPatience,
      kMostPatience);
}

// The size class of the message's largest block.
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
    auto state = state_.lock();
    if (state->queues.contains(capacity)) { // others wait already
      add(*state,
          capacity,
          {std::move(encoded), std::move(then), bytes},
          Place::kLast);
      return;
    }
  }
  if (tryToLend(encoded, then, bytes)) {
    return;
  }
  {
    const size_t capacity = classOf(encoded);
    auto state = state_.lock();
    if (!state->stopped && !state->stalled.contains(capacity)) {
      add(*state,
          capacity,
          {std::move(encoded), std::move(then), bytes},
          Place::kLast);
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
  fillBlocks(
      sources,
      bytes,
      runner_,
      base::makeTask([encoded = std::move(encoded),
                      blocks = std::move(blocks),
                      then = std::move(then)]() mutable {
        sendBlocks(std::move(encoded), std::move(blocks), {}, then);
      }));
  return true;
}

// Lends to a message that shares its copies with other messages. The message
// does not wait for memory, because the messages after it would have to wait,
// too.
void Lender::lendCommon(OneCopy& common, Encoded encoded, Then then) {
  std::vector<std::shared_ptr<Loan>> loans; // of each span; null: to be made
  std::vector<base::ConstSpan> missing;
  for (const auto& span : encoded.bulk) {
    loans.push_back(common.find(span));
    if (loans.back() == nullptr) {
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
  for (auto next = made.begin(); auto& loan : loans) {
    if (loan == nullptr) {
      loan = *next++;
    }
  }

  struct Message {
    Encoded encoded;
    Then then;
    const std::vector<std::shared_ptr<Loan>> loans;
    std::atomic<size_t> left{loans.size()};

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
      std::make_shared<Message>(std::move(encoded), std::move(then), loans);
  if (!made.empty()) {
    base::TaskPtr done = base::makeTask([made] {
      for (const auto& loan : made) {
        loan->copied();
      }
    });
    fillBlocks(sources, bytes, runner_, std::move(done));
  }
  for (const auto& loan : loans) {
    loan->whenCopied(base::makeTask([message] { message->oneCopied(); }));
  }
}

void Lender::add(State& state, size_t capacity, Waiting waiting, Place place) {
  const auto [queue, isNew] = state.queues.try_emplace(capacity);
  auto& messages = queue->second.messages;
  if (place == Place::kLast) {
    messages.push_back(std::move(waiting));
  } else {
    messages.push_front(std::move(waiting));
  }
  if (isNew) {
    queue->second.since = Clock::now();
    setAnyWaits(state);
    setTimer(state);
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
  auto state = state_.lock();
  state->stalled.erase(capacity);
  setAnyWaits(*state);
  const auto queue = state->queues.find(capacity);
  if (queue != state->queues.end()) {
    queue->second.since = Clock::now();
    // With the lock held: after stop() nothing is submitted.
    runner_.submit(
        base::makeTask([self = shared_from_this(), capacity, isIdle] {
          self->serve(capacity, isIdle);
        }));
  }
}

// Lends to the first message of the queue, and to more if there are blocks. If
// this process itself uses the block that came back, and there is no other
// block, the first message is sent without a copy: where a receiver returns
// what it is sent, no block may become idle while the message waits.
void Lender::serve(size_t capacity, bool isIdle) {
  for (;;) {
    std::optional<Waiting> first;
    {
      auto state = state_.lock();
      const auto queue = state->queues.find(capacity);
      if (queue == state->queues.end()) {
        return;
      }
      first.emplace(takeFirst(*state, queue));
    }
    if (tryToLend(first->encoded, first->then, first->bytes)) {
      continue;
    }
    if (!isIdle) {
      first->then(std::move(first->encoded));
      return;
    }
    auto state = state_.lock();
    if (!state->stopped) {
      add(*state, capacity, std::move(*first), Place::kFirst);
    }
    return;
  }
}

Lender::Waiting Lender::takeFirst(State& state, Queues::iterator queue) {
  auto& messages = queue->second.messages;
  Waiting first = std::move(messages.front());
  messages.pop_front();
  if (messages.empty()) {
    state.queues.erase(queue);
    setAnyWaits(state);
  }
  return first;
}

void Lender::expire() {
  std::vector<Waiting> expired;
  {
    auto state = state_.lock();
    const auto now = Clock::now();
    for (auto queue = state->queues.begin(); queue != state->queues.end();) {
      const auto following = std::next(queue);
      if (queue->second.until() <= now) {
        state->stalled.insert(queue->first);
        for (size_t left = queue->second.messages.size(); left != 0; --left) {
          expired.push_back(takeFirst(*state, queue));
        }
      }
      queue = following;
    }
    setAnyWaits(*state);
    setTimer(*state);
  }
  for (auto& waiting : expired) {
    waiting.then(std::move(waiting.encoded));
  }
}

void Lender::setAnyWaits(const State& state) {
  anyWaits_.store(!state.queues.empty() || !state.stalled.empty());
}

void Lender::setTimer(const State& state) {
  auto first = Clock::time_point::max();
  for (const auto& [capacity, queue] : state.queues) {
    first = std::min(first, queue.until());
  }
  timer_.set(first);
}

void Lender::stop() {
  Queues dropped; // destroyed without the lock: holds tensors
  timer_.stop();
  auto state = state_.lock();
  state->stopped = true;
  dropped.swap(state->queues);
  setAnyWaits(*state);
}

Lender::Load Lender::waiting() const {
  Load load;
  const auto state = state_.lock();
  for (const auto& [capacity, queue] : state->queues) {
    load.messages += queue.messages.size();
    for (const Waiting& waiting : queue.messages) {
      load.bytes += waiting.bytes;
    }
  }
  return load;
}

} // namespace torch_rpc_ext::agent
