#pragma once

// How two workers prove to each other that they know the group's secret, before
// either looks at the other's Preamble, and which keys they derive from the
// handshake. A connection opens with three messages:
//
//   kOpen     from the opener: its Preamble (P1), proof 1
//   kOpened   from the accepter: its Preamble (P2), proof 2
//   kConfirm  from the opener: proof 3
//
// A proof is an HMAC-SHA256, with a key made from the secret, over the proof's
// number, the accepter's door token, and the preambles that have been sent so
// far. Each incarnation of a worker draws a new door token, each preamble has a
// new challenge, and a preamble holds the group, the name and the rank. So
// whoever replays a recorded proof 1 gets at most a connection that proof 3
// never confirms, and no proof is valid for another worker, group or
// incarnation. A stranger without a valid proof 1 costs the accepter one HMAC,
// and no memory.

#include "base/buffer.h"
#include "base/error.h"
#include "crypto/crypto.h"

#include <chrono>
#include <cstdint>
#include <string>

namespace torch_rpc_ext::transport::ucx {

// How long a handshake may take. Long, because on a loaded machine a peer may
// be slow; limited, because a stranger who replays a recorded kOpen never
// finishes.
constexpr std::chrono::seconds kHandshakeTime{30};

// What the proofs and keys of a connection are made from; equal at both ends.
struct Transcript {
  uint64_t door = 0;
  std::string opener; // P1, encoded
  std::string accepter; // P2, encoded; empty for proof 1
};

// The key of all proofs of a group.
std::string groupKey(const std::string& secret);

// `number` is 1, 2 or 3.
std::string proof(const std::string& key, int number, const Transcript&);

// A preamble and its proof, as they are sent.
base::Buffer withProof(const std::string& preamble, const std::string& proof);
struct Signed {
  std::string preamble;
  std::string proof;
};
base::Result<Signed> parseSigned(base::ConstSpan bytes);

// Keys of an encrypted connection. `shared` is the result of the key exchange.
struct SessionKeys {
  std::string fromOpener;
  std::string fromAccepter;
  std::string bulkFromOpener;
  std::string bulkFromAccepter;
};
SessionKeys deriveKeys(
    const std::string& key,
    const Transcript& transcript,
    const std::string& shared);

} // namespace torch_rpc_ext::transport::ucx
