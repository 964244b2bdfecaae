#include "transport/ucx/peer_watch.h"

#include "base/log.h"

#include <utility>

namespace torch_rpc_ext::transport::ucx {

const char* toString(PeerWord word) {
  switch (word) {
    case PeerWord::kEstablished:
      return "established";
    case PeerWord::kPathLost:
      return "path lost";
    case PeerWord::kProcessEnded:
      return "process ended";
    case PeerWord::kDoubtOver:
      return "doubt over";
    case PeerWord::kGoodbye:
      return "goodbye";
    case PeerWord::kBrokeThere:
      return "broke there";
    case PeerWord::kGivenUp:
      return "given up";
    case PeerWord::kClosedHere:
      return "closed here";
  }
  return "unknown";
}

PeerState next(PeerState state, PeerWord word, bool watched) {
  if (isOver(state)) {
    // The verdict stands. But if the connection ended while the peer's process
    // may have lived and read our memory, the end of that process makes the
    // peer dead: then it cannot read any more.
    const bool mayRead =
        state == PeerState::kBroken || state == PeerState::kClosed;
    return mayRead && word == PeerWord::kProcessEnded ? PeerState::kDead
                                                      : state;
  }
  switch (word) {
    case PeerWord::kEstablished:
      return state == PeerState::kConnecting ? PeerState::kOpen : state;
    case PeerWord::kPathLost:
      // If the peer's process is watched, the verdict waits for the process to
      // end. A peer that is doubted already stays so.
      return watched ? PeerState::kDoubted : PeerState::kBroken;
    case PeerWord::kProcessEnded:
      return PeerState::kDead;
    case PeerWord::kDoubtOver:
      return state == PeerState::kDoubted ? PeerState::kBroken : state;
    case PeerWord::kGoodbye:
      return PeerState::kLeft;
    case PeerWord::kBrokeThere:
    case PeerWord::kGivenUp:
      return PeerState::kBroken;
    case PeerWord::kClosedHere:
      return PeerState::kClosed;
  }
  return state;
}

void PeerWatch::watch(
    Locked& locked,
    int32_t pid,
    std::shared_ptr<WatchedProcess> process) {
  pid_ = pid;
  process_ = std::move(process);
  if (process_ != nullptr) {
    process_->tell(locked, weak_from_this());
  }
}

void PeerWatch::hear(Locked& locked, PeerWord word, base::Error why) {
  const PeerState before = state_.load();
  const PeerState after = next(before, word, watched(locked));
  if (after == before) {
    return;
  }
  base::log(
      base::LogLevel::kDebug,
      name_ + ": " + toString(before) + " -> " + toString(after) + " (" +
          toString(word) + ")");
  if (after == PeerState::kDoubted) {
    doubt_ = std::move(why);
  } else if (isOver(after) && !isOver(before)) {
    why_ = word == PeerWord::kDoubtOver ? std::move(doubt_) : std::move(why);
    if (word == PeerWord::kProcessEnded) {
      why_ = {
          base::ErrorKind::kPeerLost,
          "process " + std::to_string(pid_) + " died"};
    }
  }
  state_ = after;
  if (after == PeerState::kDead && holds(locked)) {
    // Dropped later, without the lock: a callback may hold the last reference
    // to a tensor.
    locked.defer([held = std::exchange(held_, {})] {});
    unwatch(locked);
  }
  changed_(locked, before);
}

} // namespace torch_rpc_ext::transport::ucx
