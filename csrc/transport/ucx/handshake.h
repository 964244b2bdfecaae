#pragma once

// How two workers prove to each other that they know the group's secret,
// before either looks at anything else of the other's, and what keys they get
// out of it. A connection opens in three messages:
//
//   kOpen     its Preamble (P1), proof 1
//   kOpened   the other's Preamble (P2), proof 2
//   kConfirm  proof 3
//
// A proof is an HMAC-SHA256, with a key made from the secret, over its number,
// the door token of the one that accepts, and the preambles there are so far.
// The door token is drawn anew by each incarnation of a worker, a challenge by
// each preamble, and a preamble holds the group, the name and the rank: so a
// recorded proof 1 opens a connection at most that proof 3 never confirms, and
// no proof serves for another worker, group or incarnation. Who cannot give
// proof 1 costs one HMAC, and no memory.

#include "base/buffer.h"
#include "base/error.h"
#include "crypto/crypto.h"

#include <cstdint>
#include <string>

namespace torch_rpc_ext::transport::ucx {

// What a connection is about; equal at both ends.
struct Transcript {
  uint64_t door = 0;
  std::string opener; // P1, encoded
  std::string accepter; // P2, encoded; empty for proof 1
};

// The key of all proofs of a group.
std::string groupKey(const std::string& secret);

// `number` is 1, 2 or 3.
std::string proof(const std::string& key, int number, const Transcript&);

// A preamble and its proof, as they travel.
base::Buffer withProof(const std::string& preamble, const std::string& proof);
struct Signed {
  std::string preamble;
  std::string proof;
};
base::Result<Signed> parseSigned(base::ConstSpan bytes);

// Keys of an encrypted connection. `shared` is what the key exchange gave.
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
