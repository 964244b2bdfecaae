#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "base/gate.h"
#include "transport/transport.h"
#include "transport/ucx/lanes/lane_set.h"
#include "transport/ucx/lanes/socket.h"
#include "transport/ucx/lanes/wire.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_rpc_ext::transport::ucx::lanes {

// Sends bulk over lanes (wire.h), straight from where it lies. When there is
// more to send to a receiver than the open lanes can take, further lanes are
// opened. They stay open. A lane ends when the receiver's host is silent for
// kPatience times `keepaliveSeconds`, but not when the host answers and the
// receiver takes nothing: a process that is stopped comes back.
//
// Owns: the lanes, and the list of pieces that are to be sent; not their bytes;
//   a timer descriptor.
// Thread: any.
class BulkSender {
 public:
  BulkSender(double keepaliveSeconds, std::shared_ptr<base::Gate> gate);

  // Sends chunks to the BulkReceiver at `address`, with the tags `tag`, `tag` +
  // 1, and so on. The callback fires when the receiver has taken all chunks, or
  // with an error when no byte of them is read here any more.
  void send(
      const std::string& address,
      uint64_t tag,
      std::vector<base::ConstSpan> chunks,
      Callback callback);

  // Ends all sends.
  void stop();

 private:
  using Locked = LaneSet::Locked;
  using Clock = std::chrono::steady_clock;
  // The chunks of one send().
  struct Batch {
    size_t left = 0; // pieces that the receiver has not taken
    Callback callback;
  };
  struct Piece {
    std::shared_ptr<Batch> batch;
    PieceHeader header;
    const char* bytes = nullptr;
  };
  struct Receiver;
  struct Lane {
    uint64_t id = 0;
    Receiver* receiver = nullptr;
    size_t endpoint = 0; // index of the receiver's endpoint, for errors
    Socket socket;
    bool isOpen = false;
    bool isBlocked = false; // waits until the socket has room
    bool isQueued = false; // in writable_
    size_t helloLeft = sizeof(Hello);
    std::optional<Piece> piece = {}; // the piece that is being written
    size_t written = 0; // bytes of `piece` and of its header, so far
    std::deque<Piece> untaken = {}; // written, and not yet answered
    size_t window = 1; // most pieces without an answer
    // The host has owed an acknowledgement since then, as far as checkHosts()
    // knows. Only of a lane that carries something.
    Clock::time_point silentSince = {};

    bool carries() const {
      return piece || !untaken.empty();
    }
  };
  struct Receiver {
    Address address;
    std::vector<uint64_t> lanes;
    std::deque<Piece> waiting; // for a lane
    size_t nextEndpoint = 0;
    size_t failures = 0; // attempts to connect that failed in a row
  };

  void handle(Locked& locked, uint64_t id, uint32_t events);
  bool work(Locked& locked);
  void feed(Locked& locked, Receiver& receiver);
  bool take(Locked& locked, Lane& lane);
  void queue(Lane& lane);
  base::Error openLane(Locked& locked, Receiver& receiver);
  static bool failedToConnect(Receiver& receiver);
  void onEvents(Locked& locked, Lane& lane, uint32_t events);
  void write(Locked& locked, Lane& lane);
  // Writes what the lane has: its Hello, its piece. False if the lane has
  // failed; `error` is then errno's.
  bool writeSome(Locked& locked, Lane& lane, int& error);
  bool readAnswers(Locked& locked, Lane& lane, int& error);
  void checkHosts(Locked& locked);
  void setTimer(Locked& locked, bool runs);
  void fail(Locked& locked, uint64_t lane, base::Error why);
  void loseWaiting(Locked& locked, Receiver& receiver, const base::Error& why);
  void abort(
      Locked& locked,
      const std::shared_ptr<Batch>& batch,
      const base::Error& why);
  void end(Locked& locked, const std::shared_ptr<Batch>& batch, base::Error);

  const double keepaliveSeconds_;
  const std::chrono::duration<double> patience_;

  // All guarded by the lock of set_.
  std::unordered_map<std::string, std::unique_ptr<Receiver>> receivers_;
  std::unordered_map<uint64_t, Lane> lanes_;
  // Lanes that have a Hello or a piece to write and are not blocked.
  std::deque<uint64_t> writable_;
  std::unordered_set<std::shared_ptr<Batch>> batches_; // that have not ended
  uint64_t nextId_ = 1;
  bool stopped_ = false;
  const base::Descriptor timer_; // for checkHosts()
  bool timerIsServed_ = false; // set_ knows it: from the first lane on
  bool timerRuns_ = false;
  Clock::time_point checkedAt_ = {};

  const std::shared_ptr<LaneSet> set_; // last: it calls this object
};

} // namespace torch_rpc_ext::transport::ucx::lanes
