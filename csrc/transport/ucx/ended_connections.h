#pragma once

#include "transport/ucx/peer_watch.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

class UcxConnection;

// What is left of connections that have ended, where the peer may not know of
// the end, may still use the endpoint, or may still read memory.
//
// Owns: the connections and watches that it is given.
// Thread: any.
class EndedConnections {
 public:
  // A connection has broken, and its peer may not know that: UCX does not tell
  // a peer that this end is closed, so the peer could go on sending.
  void broke(
      Locked&,
      uint64_t localToken,
      std::shared_ptr<UcxConnection> connection);
  // Tells the peer that its connection broke at this end, unless kMaxBroken
  // other connections have broken since.
  void tell(Locked& locked, uint64_t localToken);
  // A message for a connection that has ended here. Either the message says
  // that the peer knows of the end, or the peer is told.
  void onMessage(Locked& locked, const Message& message);

  // Keeps the endpoint of a connection open until UCX finds it broken, the
  // peer's process is seen to end, or kMaxParked newer connections are kept.
  // UCX pairs the endpoints of two workers in the order in which they are made,
  // not by connection: so the peer may send messages of another connection to
  // this endpoint, and if the endpoint is closed, UCX drops messages of several
  // parts without a word. False once this worker stops.
  bool park(Locked& locked, std::shared_ptr<UcxConnection> connection);
  // Closes the connection's endpoint, if park() keeps it open.
  void unpark(Locked& locked, const UcxConnection& connection);

  // Keeps a watch, which holds memory that the peer may still be reading, until
  // the peer cannot read any more.
  void keep(Locked& locked, std::shared_ptr<PeerWatch> watch);

  // Closes all endpoints, and keeps no more connections.
  void stop(Locked& locked);
  // Looks at no process any more. What the watches hold stays.
  void unwatch(Locked& locked);

 private:
  using Broken =
      std::deque<std::pair<uint64_t, std::shared_ptr<UcxConnection>>>;

  Broken::iterator find(uint64_t localToken);

  bool stopped_ = false;
  // By token, the oldest first. A connection stays here when its peer has been
  // told, because UCX may lose what was said: only the peer's own word shows
  // that the peer knows.
  Broken broken_;
  std::deque<std::shared_ptr<UcxConnection>> parked_; // the oldest first
  std::vector<std::shared_ptr<PeerWatch>> watches_;
};

} // namespace torch_rpc_ext::transport::ucx
