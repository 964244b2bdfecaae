#pragma once

// The protocol between UCX contexts. One active-message id carries all
// messages; the UCX header of a message is a FrameHeader, and the data depends
// on the kind:
//
//   kind      token of      data
//   kOpen     the address   Preamble of the opener, proof
//   kOpened   the opener    Preamble of the accepter, proof
//   kConfirm  the accepter  proof (handshake.h)
//   kRefused  the opener    text: why
//   kFrame    the receiver  count x BulkEntry, then the bulk whose entries say
//                           kCarried, then the head
//   kBigFrame the receiver  one BulkEntry: where the data of a kFrame lies
//   kPull     the receiver  PullRequest: send these bulk spans over a channel
//   kDone     the receiver  nothing (count 0), or text: why the bulk was
//                           refused; count is the kind of the error. Transfer
//                           0: has the receiver still got the connection?
//   kAbort    the receiver  text: why bulk that the receiver has asked for does
//                           not come; count is the kind of the error
//   kClose    the receiver  nothing; count 1: broken at the sender's end
//   kSealed   the receiver  a message after the handshake, encrypted
//                           (secure_channel.h); `transfer` is its number
//
// A token is 64 random bits that the receiver of the message drew for this
// connection or, for kOpen, for its address. The data of a message without a
// known token is dropped unread.
//
// The receiver of a frame moves its bulk: the receiver reads the sender's
// memory (bulk/cma.cpp) or asks for the bulk with kPull, unless the bulk is in
// the frame (bulk/carried.h). Then the receiver tells the sender that the
// sender's memory is free again, in the header of the next message to the
// sender. A kDone of its own says so if there is no such message for a while,
// if the memory is large, or if the bulk was refused. If a span has a region,
// the receiver may keep the memory instead of copying it, and says so first
// (kKept). bulk/way.h has the ways in which bulk travels.

#include "base/buffer.h"
#include "base/error.h"
#include "transport/ucx/host_proof.h"
#include "transport/ucx/options.h"

#include <cstdint>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

constexpr unsigned kActiveMessageId = 7;
constexpr uint16_t kProtocolVersion = 12;
// The table of spans and the head travel inside the active message if they have
// no more bytes than this together. Carried bulk comes on top.
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
  uint32_t count = 0; // bulk spans of a frame; see above for others
  uint64_t token = 0;
  // The number that a frame's sender gave its bulk; 0 for a frame without bulk,
  // of which the sender need not hear that it is taken or refused. See above
  // for others.
  uint64_t transfer = 0;
  // A transfer of the message's receiver that is over; 0 for none.
  uint64_t acknowledged = 0;
};
static_assert(sizeof(FrameHeader) == 32);

// A message as it arrives.
struct Message {
  FrameHeader header;
  base::ConstSpan data;
};

struct BulkEntry {
  uint64_t size = 0;
  uint64_t address = 0; // 0: not readable from outside
  uint64_t region = 0; // not 0: shared memory that the receiver may keep
  uint64_t fd = 0; // of the region, in the sender's process; or see below
};
static_assert(sizeof(BulkEntry) == 32);

// The region belongs to the receiver, which has sent it over the same
// connection: the sender of this entry does not use it any more. The receiver
// may lend the region again at once, even before this sender has acknowledged
// the message with which the region came.
constexpr uint64_t kReturned = ~uint64_t{0};
// This bit on a descriptor says that other receivers have the region, too: the
// receiver maps it for itself (copy on write), once, and does not return it.
constexpr uint64_t kCommon = uint64_t{1} << 62;

// The bytes of the span are in the frame itself, behind the table and the bytes
// of earlier spans of this kind. The sender does the same for all spans of a
// frame.
constexpr uint64_t kCarried = ~uint64_t{1};
inline bool isCarried(const BulkEntry& entry) {
  return entry.fd == kCarried;
}

// The addresses of a UCX worker. To find out whether a peer is on this host,
// UCX compares boot ids and namespaces, which may be equal on different hosts;
// then UCX uses shared memory. So a peer that is not proved to be on this host
// is reached by the second address, and gets the second address in a kPull.
struct WorkerAddress {
  std::string all;
  std::string network; // names no shared memory

  const std::string& to(const Nearness& peer) const {
    return peer.sameHost && peer.sameRights ? all : network;
  }
};

// The content of Context::address().
struct ContextAddress {
  uint64_t door = 0; // a token that openers must know
  ProcessIdentity process;
  WorkerAddress worker;
};

// Each end introduces itself with a Preamble.
struct Preamble {
  std::string challenge; // fresh random bytes
  std::string keyShare; // empty without encryption
  Encryption encryption = Encryption::kOff;
  uint64_t token = 0; // what the receiver must put on its messages
  ProcessIdentity process;
  bool sameHost = false; // proved by the sender of this Preamble
  WorkerAddress address;
  std::string hello; // from the Handler, opaque here
};

// Over what a bulk::Channel moves bulk.
enum class ChannelKind : uint8_t {
  kUcx = 0,
  kLanes,
};

struct PullRequest {
  uint32_t firstSpan = 0;
  uint32_t spanCount = 0;
  uint64_t tag = 0; // of the first chunk; later chunks count up
  ChannelKind channel = ChannelKind::kUcx;
  std::string bulkAddress; // of the channel that receives the bulk
};

// This bit on a transfer's number says that the receiver of the bulk has mapped
// the memory and keeps it for now. The number without this bit follows when the
// receiver has let go of the memory.
constexpr uint64_t kKept = uint64_t{1} << 63;
// This bit says that the receiver of the bulk has let go of the memory, but has
// forked meanwhile, and its child may read the memory for as long as it likes.
constexpr uint64_t kForked = uint64_t{1} << 62;

// How a bulk span is cut for kPull. Both ends number the chunks in this way.
constexpr size_t kChunkBytes = 16u << 20;
inline uint64_t chunkCount(uint64_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

// 64 random bits, not 0.
uint64_t randomToken();

// The text of a reason that a peer gives, cut to a length that people read.
std::string toText(base::ConstSpan data);

base::Result<FrameHeader> parseHeader(base::ConstSpan bytes);

// The data of a message that gives a reason: the text, cut as by toText().
base::Buffer encodeReason(const base::Error& why);
// What a kDone or a kAbort gives as its reason; no error if its `count` is 0.
base::Error reasonOf(const Message& message);

base::Buffer encode(const Preamble&);
base::Result<Preamble> parsePreamble(base::ConstSpan bytes);

base::Buffer encode(const PullRequest&);
base::Result<PullRequest> parsePullRequest(base::ConstSpan bytes);

// The first `count` entries of a frame's data. Then come carried bulk and the
// head.
base::Result<std::vector<BulkEntry>> parseBulkEntries(
    base::ConstSpan bytes,
    uint32_t count);

std::string encodeAddress(const ContextAddress& address);
base::Result<ContextAddress> parseAddress(const std::string& bytes);

} // namespace torch_rpc_ext::transport::ucx
