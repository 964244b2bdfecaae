#pragma once

// What UCX contexts say to each other. One active-message id carries
// everything; its UCX header is a FrameHeader, its data depends on the kind:
//
//   kind      token of      data
//   kOpen     the address   Preamble of the one who connects, proof
//   kOpened   the opener    Preamble of the one who accepts, proof
//   kConfirm  the accepter  proof (handshake.h)
//   kRefused  the opener    text: why
//   kFrame    the receiver  count x BulkEntry, then the head
//   kBigFrame the receiver  one BulkEntry: where the data of a kFrame lies
//   kPull     the receiver  PullRequest: send these bulk spans through UCX
//   kDone     the receiver  nothing (status 0), or the reason of the refusal
//   kAbort    the receiver  text: why bulk that it has asked for does not come;
//                           count is the kind of the error
//   kClose    the receiver  nothing; count 1: not by choice, it broke
//   kSealed   the receiver  any of those from kFrame on, encrypted
//                           (secure_channel.h); `transfer` is its number
//
// A token is 64 random bits that the receiver drew for this connection; bytes
// without a known token are dropped unread. Bulk is moved by the receiver: it
// reads the sender's memory (cma.h) or asks for it with kPull, and says when
// the sender may have its memory back: in the header of the next message that
// goes there anyway, or by kDone when there is none for a while, or much
// memory, or a reason why the bulk was not taken. Of bulk with a region it may
// keep the memory instead, and says that first (kAdopted).

#include "base/buffer.h"
#include "base/error.h"
#include "transport/ucx/host_proof.h"
#include "transport/ucx/options.h"

#include <cstdint>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

constexpr unsigned kActiveMessageId = 7;
constexpr uint16_t kProtocolVersion = 7;
// Data up to this size travels inside the active message.
constexpr size_t kMaxEagerBytes = 64u << 10;
constexpr size_t kMaxHelloBytes = 64u << 10;
constexpr size_t kMaxAddressBytes = 16u << 10;
constexpr size_t kChallengeBytes = 16;
constexpr size_t kKeyShareBytes = 32;
constexpr uint32_t kMaxBulkSpans = 1u << 20;

enum class FrameKind : uint16_t {
  kOpen = 1,
  kOpened,
  kRefused,
  kFrame,
  kBigFrame,
  kPull,
  kDone,
  kClose,
  kConfirm,
  kSealed,
  kAbort,
};

struct FrameHeader {
  uint16_t version = kProtocolVersion;
  FrameKind kind = FrameKind::kFrame;
  uint32_t count = 0; // bulk spans of a frame; status of others
  uint64_t token = 0;
  uint64_t transfer = 0; // the sender's number for a frame's bulk, or 0
  uint64_t acknowledged = 0; // a transfer of the receiver's that is done, or 0
};
static_assert(sizeof(FrameHeader) == 32);

struct BulkEntry {
  uint64_t size = 0;
  uint64_t address = 0; // 0: not readable from outside, pull it
  uint64_t region = 0; // not 0: shared memory that the receiver may keep
  uint64_t fd = 0; // of the region, in the sender's process; or kReturned
};
static_assert(sizeof(BulkEntry) == 32);

// The region is one of the receiver's own, which it has sent over the same
// connection: the sender does not use it any more. It may come again at once,
// before the sender has said so of the message that it came with.
constexpr uint64_t kReturned = ~uint64_t{0};

// Of a UCX worker. UCX takes a peer for one of this host by comparing boot ids
// and namespaces, which may be equal elsewhere; then it uses shared memory. Who
// has not been proved to be of this host is shown, and reached by, the second.
struct WorkerAddress {
  std::string all;
  std::string network; // no shared memory in it

  const std::string& to(const Nearness& peer) const {
    return peer.sameHost ? all : network;
  }
};

// What Context::address() says.
struct ContextAddress {
  uint64_t door = 0; // a token: who does not know it is not let in
  ProcessIdentity process;
  WorkerAddress worker;
};

// Both ends introduce themselves with it.
struct Preamble {
  std::string challenge; // fresh random bytes
  std::string keyShare; // empty where there is no encryption
  Encryption encryption = Encryption::kOff;
  uint64_t token = 0; // what the other side must put on its frames
  ProcessIdentity process;
  bool sameHost = false; // it has proved the receiver to be of its host
  WorkerAddress address;
  std::string hello; // opaque: the Handler's
};

struct PullRequest {
  uint32_t firstSpan = 0;
  uint32_t spanCount = 0;
  uint64_t tag = 0; // of the first chunk; the following count up
  std::string bulkAddress; // of the UCX worker that receives
};

// On a transfer's number: its receiver has mapped the memory and keeps it for
// now. The number alone follows when it has let go.
constexpr uint64_t kAdopted = uint64_t{1} << 63;
// The same: its receiver has let go, but has forked meanwhile, and its child
// may read the memory for as long as it likes.
constexpr uint64_t kForked = uint64_t{1} << 62;

// How a bulk span is cut for kPull: both ends count chunks in this way.
constexpr size_t kChunkBytes = 16u << 20;
inline uint64_t chunkCount(uint64_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

// 64 random bits, not 0.
uint64_t randomToken();

// A reason that a peer gives, for people: not more of it than they read.
std::string toText(base::ConstSpan data);

base::Result<FrameHeader> parseHeader(base::ConstSpan bytes);

base::Buffer encode(const Preamble&);
base::Result<Preamble> parsePreamble(base::ConstSpan bytes);

base::Buffer encode(const PullRequest&);
base::Result<PullRequest> parsePullRequest(base::ConstSpan bytes);

// The first `count` entries of a frame's data; the rest is its head.
base::Result<std::vector<BulkEntry>> parseBulkEntries(
    base::ConstSpan bytes,
    uint32_t count);

std::string encodeAddress(const ContextAddress& address);
base::Result<ContextAddress> parseAddress(const std::string& bytes);

} // namespace torch_rpc_ext::transport::ucx
