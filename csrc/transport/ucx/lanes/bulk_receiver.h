#pragma once

#include "base/buffer.h"
#include "base/descriptor.h"
#include "base/error.h"
#include "base/gate.h"
#include "base/log.h"
#include "transport/transport.h"
#include "transport/ucx/lanes/lane_set.h"
#include "transport/ucx/lanes/socket.h"
#include "transport/ucx/lanes/wire.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx::lanes {

struct Options {
  std::pair<uint16_t, uint16_t> ports; // to listen at; {0, 0}: any
  double keepaliveSeconds = 2.0;
};

// Receives bulk over lanes (wire.h), straight into its final memory. Each
// receive() names the tags that its chunks will come with, and is called before
// the sender is asked for the chunks. What comes with any other tag is dropped.
//
// Owns: the listening sockets, the lanes that senders have opened, a spare
//   descriptor.
// Thread: any.
class BulkReceiver {
 public:
  BulkReceiver(Options options, std::shared_ptr<base::Gate> gate);

  // The address at which senders reach this receiver by these local IP
  // addresses, encoded. Listens there from now on.
  base::Result<std::string> addressAt(const std::vector<std::string>& ips);

  // Expects chunks, which come with the tags `tag`, `tag` + 1, and so on: tags
  // that no other receive() has had, and that no stranger can guess.
  // Returns an id for cancel(). `arrived`, which may be null, is called for
  // chunks that have arrived, in any order.
  uint64_t receive(
      uint64_t tag,
      std::vector<base::MutableSpan> chunks,
      Callback callback,
      Incoming::Arrived arrived);
  // Ends a receive() with an error, unless it has ended. Nothing is written to
  // its memory after its callback has fired.
  void cancel(uint64_t id, const base::Error& why);

  // Ends all receives.
  void stop();

 private:
  using Locked = LaneSet::Locked;
  // The chunks of one receive().
  struct Batch {
    uint64_t id = 0;
    uint64_t firstTag = 0;
    size_t chunks = 0;
    size_t left = 0; // chunks that are not complete
    Callback callback;
    Incoming::Arrived arrived;
  };
  struct Expected {
    std::shared_ptr<Batch> batch;
    base::MutableSpan memory;
    uint64_t left = 0; // bytes that have not come
  };
  using ByTag = std::unordered_map<uint64_t, Expected>;
  struct Lane {
    uint64_t id = 0;
    Socket socket;
    bool isKnown = false; // its Hello was right
    Hello hello = {};
    PieceHeader piece = {};
    size_t got = 0; // bytes of the Hello, or of the header, or of the piece
    bool inPiece = false;
    bool isDropped = false; // nobody expected the piece when its header came
  };

  void handle(Locked& locked, uint64_t id, uint32_t events);
  // False if no connection waits any more.
  bool accept(Locked& locked, const Socket& listener);
  void acceptAndClose(Locked&, const Socket& listener);
  bool readHello(Lane& lane);
  // False if the lane has ended or must end.
  bool readPiece(Locked& locked, Lane& lane);
  bool takeHeader(Lane& lane);
  // What the lane's piece is received into; end() for a piece to be dropped. To
  // be called each time: the receive may have been cancelled in the middle of
  // the piece, and nothing is written to its memory then. A piece that nobody
  // expected stays dropped, whatever begins meanwhile, because takeHeader() has
  // compared the place of the piece with no memory.
  ByTag::iterator expectedOf(const Lane& lane);
  void pieceDone(Locked& locked, Lane& lane);
  // Reads into the rest of a Hello or a header. 1: it is complete; 0: no more
  // bytes are there; -1: the lane has ended.
  static int fill(Lane& lane, void* into, size_t size);
  void drop(Locked& locked, uint64_t id);
  void end(Locked& locked, const std::shared_ptr<Batch>& batch, base::Error);

  const Options options_;
  const std::string key_;
  base::LimitedLog strangers_;

  // All guarded by the lock of set_.
  std::unordered_map<uint64_t, std::pair<Socket, Endpoint>> listeners_;
  std::unordered_map<uint64_t, Lane> lanes_;
  std::deque<uint64_t> unknown_; // lanes whose Hello has not come, by age
  ByTag expected_;
  std::unordered_map<uint64_t, std::shared_ptr<Batch>> batches_;
  uint64_t nextId_ = 1;
  bool stopped_ = false;
  base::Buffer dropped_; // takes the bytes that nobody expects
  base::Descriptor spare_; // for acceptAndClose()

  const std::shared_ptr<LaneSet> set_; // last: it calls this object
};

} // namespace torch_rpc_ext::transport::ucx::lanes
