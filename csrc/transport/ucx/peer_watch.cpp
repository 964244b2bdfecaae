#include "transport/ucx/peer_watch.h"

#include "base/log.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

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

PeerWatch::~PeerWatch() {
  closePidFd();
}

int PeerWatch::openProcess(int32_t pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

void PeerWatch::watch(Locked&, base::Poller& poller, int32_t pid, int pidFd) {
  pid_ = pid;
  pidFd_ = pidFd;
  if (pidFd_ < 0) {
    return; // an old kernel, where UCX's keepalive must do
  }
  poller_ = &poller;
  poller.add(pidFd_, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->worker_->post([self](Locked& locked) {
        if (!isOver(self->state())) {
          // Messages that the peer sent before its process ended count:
          // answers, and its goodbye. So they are taken first.
          locked.progressAll();
        }
        self->hear(locked, PeerWord::kProcessEnded);
      });
    }
  });
}

void PeerWatch::closePidFd() {
  if (pidFd_ >= 0) {
    poller_->remove(pidFd_);
    ::close(pidFd_);
    pidFd_ = -1;
  }
}

bool PeerWatch::processEnded(Locked&) const {
  pollfd state{pidFd_, POLLIN, 0};
  return pidFd_ >= 0 && ::poll(&state, 1, 0) == 1;
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
