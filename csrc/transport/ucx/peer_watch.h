#pragma once

#include "base/error.h"
#include "base/poller.h"
#include "transport/peer_state.h"
#include "transport/transport.h"
#include "transport/ucx/worker.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// What somebody has to say about a peer.
enum class PeerWord : uint8_t {
  kEstablished, // the handshake is over
  kPathLost, // UCX's error: a reset, a time-out, its keepalive
  kProcessEnded, // the pidfd
  kDoubtOver, // the pidfd has been given its time
  kGoodbye, // the peer leaves
  kBrokeThere, // the peer says that the connection broke at its end
  kGivenUp, // this worker ends it: the peer breaks the protocol, or has a
            // successor
  kClosedHere, // this worker closes it
};
inline constexpr uint8_t kPeerWords = 8;

const char* toString(PeerWord word);

// Every transition there is. `watched`: the process is of this host, and its
// end will be noticed. The words come in any order: the process of a worker
// that is killed ends after the kernel has reset its sockets, and both are
// noticed by different threads.
PeerState next(PeerState state, PeerWord word, bool watched);

// The one judge of the peer of one connection: joins what UCX, the pidfd and
// the peer itself say into a PeerState.
//
// Owns: the state, the pidfd, memory that the peer may go on reading after the
//   connection has ended, until its process has ended too.
// Thread: any.
class PeerWatch : public std::enable_shared_from_this<PeerWatch> {
 public:
  // Runs after each change.
  using Changed = std::function<void(Locked&, PeerState before)>;

  // `name` is for the log.
  PeerWatch(
      std::shared_ptr<ControlWorker> worker,
      std::string name,
      Changed changed)
      : worker_(std::move(worker)),
        name_(std::move(name)),
        changed_(std::move(changed)) {}
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  PeerState state() const {
    return state_.load();
  }
  // Why it is over; once it is.
  const base::Error& why() const {
    return why_;
  }

  // A pidfd, or -1: there is no such process, or the kernel has no pidfds.
  static int openProcess(int32_t pid);
  // Hears from now on when the process ends; owns its pidfd, which may be -1.
  void watch(Locked&, base::Poller& poller, int32_t pid, int pidFd);
  void unwatch(Locked&) {
    closePidFd();
  }
  bool watched(Locked&) const {
    return pidFd_ >= 0;
  }
  // Whether the process has ended, a zombie's too; false if it is not watched.
  bool processEnded(Locked&) const;

  // `why` is what the connection ends with, if the word ends it.
  void hear(Locked&, PeerWord word, base::Error why = {});

  // Memory that the peer may be reading: held by the callback until the process
  // has ended, or, where that cannot be noticed, for as long as this lives.
  void hold(Locked&, Callback memory) {
    held_.push_back(std::move(memory));
  }
  bool holds(Locked&) const {
    return !held_.empty();
  }

 private:
  void closePidFd();

  const std::shared_ptr<ControlWorker> worker_;
  const std::string name_;
  const Changed changed_;
  std::atomic<PeerState> state_{PeerState::kConnecting};
  base::Error doubt_; // what it is doubted for
  base::Error why_; // written once, before state_ says that it is over
  base::Poller* poller_ = nullptr;
  int32_t pid_ = 0;
  int pidFd_ = -1;
  std::vector<Callback> held_;
};

} // namespace torch_rpc_ext::transport::ucx
