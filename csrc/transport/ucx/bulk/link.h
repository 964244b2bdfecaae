#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "transport/peer_state.h"
#include "transport/transport.h"
#include "transport/ucx/host_proof.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx::bulk {

// What the bulk of a connection has to know of the peer.
struct Peer {
  int32_t pid = 0;
  Nearness nearness = {};
  bool mayReadHere = false; // the peer may be able to read our memory
  // Empty when this process can read the peer's memory.
  std::string whyUnreadable = {};
  std::string sendKey = {}; // both keys: empty without encryption
  std::string receiveKey = {};
  // Our IP addresses at which the peer reaches us, if the connection uses TCP
  // and nothing else.
  std::vector<std::string> reachesUsAt = {};

  bool readable() const {
    return whyUnreadable.empty();
  }
};

// The connection, as its bulk sees it.
// Thread: any.
class Link {
 public:
  virtual ControlWorker& worker() const = 0;
  // Keeps the connection, and its Exchange, while the pointer lives.
  virtual std::shared_ptr<void> keep() = 0;
  virtual PeerState peer() const = 0;
  // How long ago the last message of the peer has come.
  virtual std::chrono::steady_clock::duration silence(Locked&) const = 0;
  // Why the connection is over; to be called once it is over.
  virtual const base::Error& ending() const = 0;

  // Sends a message to the peer, under the peer's token.
  virtual void tell(Locked&, FrameHeader header, base::Buffer data) = 0;
  // Sends a message that may say why something has failed.
  void tellReason(
      Locked& locked,
      FrameKind kind,
      uint64_t transfer,
      const base::Error& why) {
    tell(
        locked,
        {.kind = kind,
         .count = static_cast<uint32_t>(why.kind),
         .transfer = transfer},
        encodeReason(why));
  }
  // Ends the connection, because the peer breaks the protocol.
  virtual void giveUp(Locked&, base::Error why) = 0;
  // Calls Exchange::acknowledge() a little later.
  virtual void acknowledgeSoon(Locked&) = 0;
  // Calls `callback` with the error that users are to see: ending() if the
  // connection is over, which says what has become of the peer; else `error`.
  // If `error` is kPeerLost and the peer's process is watched, the callback
  // comes after the verdict about the peer.
  virtual void whenJudged(base::Error error, Callback callback) = 0;

 protected:
  ~Link() = default;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
