#pragma once

// Bulk over plain TCP. A message travels in pieces over several connections at
// once, its lanes; each lane goes one way, from the process that opened it.
//
// The sender begins a lane with a Hello, and then sends pieces: a PieceHeader,
// and the bytes. The receiver answers each piece with one byte once it has
// taken the piece out of the socket. A sender limits the unanswered pieces of a
// lane, so that they fit into the lane's buffers: the kernel then moves them
// three times as fast as a stream that is always full, in which both sides wake
// up for every few packets and wait for each other's lock on the socket
// (docs/decisions/0030-lanes.md).
//
// Whoever connects is a stranger until the Hello is right: the Hello contains
// the receiver's key, which the receiver has told its peers over their own
// connections.

#include <cstddef>
#include <cstdint>

namespace torch_rpc_ext::transport::ucx::lanes {

constexpr size_t kPieceBytes = size_t{256} << 10;
constexpr size_t kKeyBytes = 16;
constexpr uint64_t kMagic = 0x31656e616c637072; // "rpclane1"

struct Hello {
  uint64_t magic = kMagic;
  char key[kKeyBytes] = {};
};
static_assert(sizeof(Hello) == 24);

struct PieceHeader {
  uint64_t tag = 0; // of the chunk that the piece belongs to
  uint64_t offset = 0; // of the piece in the chunk
  uint64_t size = 0; // at most kPieceBytes
};
static_assert(sizeof(PieceHeader) == 24);

} // namespace torch_rpc_ext::transport::ucx::lanes
