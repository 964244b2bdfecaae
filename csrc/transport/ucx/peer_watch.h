#pragma once

#include "base/error.h"
#include "transport/peer_state.h"
#include "transport/transport.h"
#include "transport/ucx/watched_processes.h"
#include "transport/ucx/worker.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// News about a peer: from UCX, from the kernel, from the peer itself, or from
// this worker.
enum class PeerWord : uint8_t {
  kEstablished, // the handshake is over
  kPathLost, // an error of UCX: a reset, a time-out, its keepalive
  kProcessEnded, // the pidfd says so
  kDoubtOver, // the time for the pidfd to report the end is over
  kGoodbye, // the peer leaves
  kBrokeThere, // the peer says that the connection broke at its end
  // This worker ends the connection, because the peer breaks the protocol, or
  // has a successor, or because of an error here.
  kGivenUp,
  kClosedHere, // this worker closes the connection
};
inline constexpr uint8_t kPeerWords = 8;

const char* toString(PeerWord word);

// All transitions of PeerState. `watched`: the process runs on this host, and
// its end will be noticed. The words may come in any order: when a worker is
// killed, its process ends only after the kernel has reset its sockets, and
// different threads notice the two events.
PeerState next(PeerState state, PeerWord word, bool watched);

// The only judge of one connection's peer: turns what UCX, the pidfd, the peer
// and this worker say into a PeerState.
//
// Owns: the state; the memory that the peer may go on reading after
//   the connection has ended, until the peer's process has ended too.
// Thread: any.
class PeerWatch : public std::enable_shared_from_this<PeerWatch> {
 public:
  // Runs after each change of the state.
  using Changed = std::function<void(Locked&, PeerState before)>;

  // `name` is for the log.
  PeerWatch(std::string name, Changed changed)
      : name_(std::move(name)), changed_(std::move(changed)) {}
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  PeerState state() const {
    return state_.load();
  }
  // Why the connection is over; to be called once it is over.
  const base::Error& why() const {
    return why_;
  }

  // From now on notices when the process ends. `process` may be null: on an old
  // kernel, UCX's keepalive must do.
  void
  watch(Locked& locked, int32_t pid, std::shared_ptr<WatchedProcess> process);
  void unwatch(Locked&) {
    process_.reset();
  }
  bool watched(Locked&) const {
    return process_ != nullptr;
  }
  // Whether the process has ended; a zombie has ended, too. False if the
  // process is not watched.
  bool processEnded(Locked&) const {
    return process_ != nullptr && process_->ended();
  }

  // Takes `word` into account. If `word` ends the connection, `why` is the
  // reason.
  void hear(Locked&, PeerWord word, base::Error why = {});

  // Keeps memory that the peer may be reading, which `memory` holds, until the
  // process has ended. If the end of the process cannot be noticed, keeps the
  // memory for as long as this PeerWatch lives.
  void hold(Locked&, Callback memory) {
    held_.push_back(std::move(memory));
  }
  bool holds(Locked&) const {
    return !held_.empty();
  }

 private:
  const std::string name_;
  const Changed changed_;
  std::atomic<PeerState> state_{PeerState::kConnecting};
  base::Error doubt_; // why the peer is doubted
  // Written once, before state_ says that the connection is over.
  base::Error why_;
  int32_t pid_ = 0;
  std::shared_ptr<WatchedProcess> process_;
  std::vector<Callback> held_;
};

} // namespace torch_rpc_ext::transport::ucx
