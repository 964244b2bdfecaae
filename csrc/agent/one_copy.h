#pragma once

#include "base/buffer.h"
#include "base/synchronized.h"
#include "base/task.h"
#include "memory/buffer_cache.h"

#include <c10/core/Storage.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

// A copy of some bytes in shared memory, which one or several messages lend.
// Thread: any.
class Loan {
 public:
  using Block = memory::BufferCache::Block;

  // `isCommon`: several messages may lend the block.
  Loan(base::ConstSpan from, std::shared_ptr<Block> block, bool isCommon)
      : isCommon(isCommon), from_(from), block_(std::move(block)) {}

  const bool isCommon;

  base::ConstSpan from() const {
    return from_;
  }
  const std::shared_ptr<Block>& block() const {
    return block_;
  }
  // Runs `then` once the bytes are in the block: at once, or on the thread that
  // calls copied().
  void whenCopied(base::TaskPtr then);
  void copied();

 private:
  struct State {
    bool copied = false;
    std::vector<base::TaskPtr> waiting;
  };

  const base::ConstSpan from_;
  const std::shared_ptr<Block> block_;
  base::Synchronized<State> state_;
};

// Calls with the same tensors to several workers of this host: while a thread
// is inside of a OneCopy, the messages that it sends share the copies of their
// bulk. Each receiver maps the copy as its own: it sees its own writes only.
//
// The value of a tensor is that of the first message. The caller must not write
// to the tensors as long as the OneCopy exists.
//
// Owns: the loans, and the storages that were copied: so no other tensor can
//   get their address meanwhile.
// Thread: one at a time.
class OneCopy {
 public:
  // Shares the copies of all tensors, or `only` of those whose memory begins at
  // these addresses.
  explicit OneCopy(std::optional<std::vector<const void*>> only = std::nullopt)
      : only_(std::move(only)) {}

  // The OneCopy that the calling thread is inside of; null if there is none.
  static OneCopy* current();
  // Makes `next` the current OneCopy of the calling thread, and returns the
  // former one. The caller keeps `next` alive until it sets another one.
  static OneCopy* setCurrent(OneCopy* next);

  // Whether the messages share the copy of these bytes.
  bool shares(base::ConstSpan bytes) const;
  // The shared copy of these bytes; null if there is none yet.
  std::shared_ptr<Loan> find(base::ConstSpan bytes) const;
  // Keeps the shared ones of `loans`. `sources` are the storages that the loans
  // are copies of, and maybe others.
  void add(
      const std::vector<std::shared_ptr<Loan>>& loans,
      const std::vector<c10::Storage>& sources);

 private:
  const std::optional<std::vector<const void*>> only_;
  std::vector<std::shared_ptr<Loan>> loans_;
  std::vector<c10::Storage> sources_;
};

} // namespace torch_rpc_ext::agent
