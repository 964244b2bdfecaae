#pragma once

#include <cstdint>

namespace torch_rpc_ext::transport {

// What is known of the worker at the other end of a connection. All who ask
// whether a peer is there, has left or has died ask for this, and nothing else
// (transport/ucx/peer_watch.h decides it).
enum class PeerState : uint8_t {
  kConnecting,
  kOpen,
  // The way to it is lost, and its process, which is of this host, has not been
  // seen to end: it is waited for, a moment, before the verdict.
  kDoubted,
  // From here on the connection is over.
  kLeft, // it said goodbye
  kBroken, // the way to it is lost; its process may live
  kDead, // its process has ended
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

} // namespace torch_rpc_ext::transport
