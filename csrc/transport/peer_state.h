#pragma once

#include <cstdint>

namespace torch_rpc_ext::transport {

// What is known of the worker at the other end of a connection. All code that
// has to know whether a peer is there, has left or has died asks for this state
// and for nothing else, so there is one verdict (transport/ucx/peer_watch.h
// makes it).
enum class PeerState : uint8_t {
  kConnecting,
  kOpen,
  // The way to the peer is lost, but its process, which runs on this host, has
  // not been seen to end. The verdict waits a moment for that end.
  kDoubted,
  // In all the following states the connection is over.
  kLeft, // the peer said goodbye
  kBroken, // the way to the peer is lost; its process may live
  kDead, // the peer's process has ended
  kClosed, // this worker closed the connection
};

constexpr const char* toString(PeerState state) {
  switch (state) {
    case PeerState::kConnecting:
      return "connecting";
    case PeerState::kOpen:
      return "open";
    case PeerState::kDoubted:
      return "doubted";
    case PeerState::kLeft:
      return "left";
    case PeerState::kBroken:
      return "broken";
    case PeerState::kDead:
      return "dead";
    case PeerState::kClosed:
      return "closed";
  }
  return "unknown";
}

constexpr bool isOver(PeerState state) {
  return state >= PeerState::kLeft;
}

// Whether the worker is dead or has left. Such a worker does not come back at
// the same address.
constexpr bool isGone(PeerState state) {
  return state == PeerState::kLeft || state == PeerState::kDead;
}

} // namespace torch_rpc_ext::transport
