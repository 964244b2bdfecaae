// Cross-memory attach (CMA): one process reads another's memory with
// process_vm_readv. UCX can do this too, but never chooses CMA for endpoints
// that notice errors, and copies on the thread that holds the worker. Here the
// receiver reads, with threads of the pool, into a buffer from the cache.

#include "transport/ucx/bulk/way.h"

#include "base/short_time_slices.h"
#include "base/synchronized.h"

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

namespace torch_rpc_ext::transport::ucx::bulk {

namespace {

// One system call reads at most this much, because a kernel that does not
// preempt itself can let another thread run only between two system calls.
constexpr size_t kCallBytes = 1u << 20;
// How much a thread takes at a time. Large, because threads that work on the
// same huge page slow each other down: 400 MB took 62 ms by 1 MiB at a time,
// and 55 ms by 8 MiB.
constexpr size_t kShareBytes = 8u << 20;
// Below this a second thread costs more than it saves (measured: no gain at 4
// MB, a third of the time saved at 400 MB on two cores).
constexpr size_t kBytesPerThread = 16u << 20;
constexpr unsigned kMaxThreads = 4;
constexpr size_t kMaxIov = 256;

// One fetch(), shared by its tasks.
class Read {
 public:
  Read(int32_t pid, Fetch fetch)
      : pid_(pid), callback_(std::move(fetch.callback)) {
    for (size_t i = 0; i < fetch.into.size(); ++i) {
      const base::MutableSpan& into = fetch.into[i];
      for (size_t at = 0; at < into.size; at += kCallBytes) {
        const size_t n = std::min(kCallBytes, into.size - at);
        remote_.push_back(
            {reinterpret_cast<void*>(fetch.from[i].address + at), n});
        local_.push_back({static_cast<char*>(into.data) + at, n});
        total_ += n;
      }
    }
    tasks_.store(threads());
  }

  unsigned threads() const {
    // Asked once, because hardware_concurrency() opens a file each time.
    static const unsigned cores =
        std::max(1u, std::thread::hardware_concurrency());
    return static_cast<unsigned>(std::clamp<size_t>(
        total_ / kBytesPerThread, 1, std::min(cores, kMaxThreads)));
  }

  // Runs in each task.
  void work() {
    std::optional<base::ShortTimeSlices> slices;
    if (total_ >= kBytesPerThread) {
      slices.emplace();
    }
    for (;;) {
      auto [begin, end] = take();
      if (begin == end) {
        break;
      }
      while (begin != end) {
        const size_t next = upTo(kCallBytes, begin, end);
        readPieces(begin, next);
        begin = next;
        if (slices) {
          slices->yield();
        }
      }
    }
    slices.reset();
    if (tasks_.fetch_sub(1) == 1) {
      const base::Error error = state_.lock()->error;
      callback_(error);
    }
  }

 private:
  struct State {
    size_t next = 0;
    base::Error error;
  };

  std::pair<size_t, size_t> take() {
    const auto state = state_.lock();
    const size_t begin = state->next;
    state->next = upTo(kShareBytes, begin, local_.size());
    return {begin, state->next};
  }

  // The end of a run of pieces that starts at `begin` and has at most `bytes`,
  // but at least one piece.
  size_t upTo(size_t bytes, size_t begin, size_t end) const {
    size_t next = begin;
    size_t sum = 0;
    while (next < end && next - begin < kMaxIov &&
           (next == begin || sum + local_[next].iov_len <= bytes)) {
      sum += local_[next++].iov_len;
    }
    return next;
  }

  void readPieces(size_t begin, size_t end) {
    size_t expected = 0;
    for (size_t i = begin; i < end; ++i) {
      expected += local_[i].iov_len;
    }
    const ssize_t n = process_vm_readv(
        pid_, &local_[begin], end - begin, &remote_[begin], end - begin, 0);
    if (n == static_cast<ssize_t>(expected)) {
      return;
    }
    const int code = n < 0 ? errno : EFAULT;
    const auto state = state_.lock();
    state->next = local_.size(); // ends all tasks: going on is no use
    if (!state->error) {
      state->error = {
          code == ESRCH ? base::ErrorKind::kPeerLost : base::ErrorKind::kSystem,
          "reading " + std::to_string(expected) + " bytes of process " +
              std::to_string(pid_) + " failed: " + std::strerror(code)};
    }
  }

  const int32_t pid_;
  const Callback callback_;
  std::vector<iovec> remote_;
  std::vector<iovec> local_;
  size_t total_ = 0;
  std::atomic<unsigned> tasks_{0}; // that have not ended
  base::Synchronized<State> state_;
};

class Cma final : public Way {
 public:
  explicit Cma(const Ends& ends) : ends_(ends) {}

  // The peer must not read a span that is still being filled.
  void offer(Locked&, uint64_t, const BulkSpan& span, BulkEntry& entry)
      override {
    if (ends_.peer.mayReadHere && span.whenFilled == nullptr) {
      entry.address = reinterpret_cast<uint64_t>(span.data);
    }
  }

  bool takes(const std::vector<BulkEntry>& from) const override {
    return ends_.peer.readable() &&
        std::all_of(from.begin(), from.end(), [](const BulkEntry& entry) {
             return entry.address != 0 || entry.size == 0;
           });
  }

  void fetch(Fetch fetch) override {
    const auto read = std::make_shared<Read>(ends_.peer.pid, std::move(fetch));
    const unsigned threads = read->threads();
    for (unsigned i = 0; i < threads; ++i) {
      ends_.resources.runner().submit(base::makeTask([read] { read->work(); }));
    }
  }

 private:
  const Ends ends_;
};

} // namespace

std::unique_ptr<Way> cma(const Ends& ends) {
  return std::make_unique<Cma>(ends);
}

} // namespace torch_rpc_ext::transport::ucx::bulk
