#pragma once

#include "transport/transport.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/worker.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

class UcxContext;

enum class ConnectionState : uint8_t {
  kOpening, // the preamble is sent, frames are kept
  kOpen,
  kClosed, // by us, by the peer or by an error: nothing is delivered any more
};

const char* toString(ConnectionState state);

// When a connection ends: whether the peer may go on reading our memory.
enum class PeerMemory : uint8_t {
  kFree, // it has said goodbye, or died
  kMayRead,
};

// One UCX endpoint and what is under way on it.
//
// Owns: the endpoint, unsent frames, bulk that the peer has not yet taken.
// Thread: send(), close(), path(), fetch(), done() any; the rest under the
//   control worker's lock.
// Outlives: nothing; UcxContext keeps it until its endpoint is closed.
class UcxConnection final : public Connection,
                            public std::enable_shared_from_this<UcxConnection> {
 public:
  UcxConnection(
      std::shared_ptr<UcxContext> context,
      uint64_t localToken,
      bool initiator);

  void send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback)
      override;
  void close() override;
  bool closed() const override {
    return state_.load() == ConnectionState::kClosed;
  }
  PathInfo path() const override;

  // Moves the peer's bulk spans [first, first + into.size()) of `transfer`
  // here, in the best way there is.
  void fetch(
      uint64_t transfer,
      uint32_t first,
      const std::vector<BulkEntry>& from,
      const std::vector<base::MutableSpan>& into,
      Callback callback);
  // Tells the peer that the memory of `transfer`, `bytes` in all, is its own
  // again: now, or soon when it went well and is little.
  void done(uint64_t transfer, uint64_t bytes, const base::Error& error);
  // The peer's shared memory itself; null if there is none, or it cannot be
  // had.
  std::shared_ptr<void> map(const BulkEntry& entry);

  void deliveryEnds(); // any thread

  // ---- under the lock ----
  base::Error openEndpoint(const std::string& workerAddress);
  void sendPreamble(FrameKind kind, uint64_t token, const std::string& hello);
  void sendRefusal(uint64_t token, const std::string& why);
  // The peer introduced itself: from here on frames flow.
  void establish(Preamble peer);
  // Messages that arrived before the peer's introduction, in their order.
  using EarlyMessages = std::vector<std::pair<FrameHeader, base::Buffer>>;
  void keepEarly(const FrameHeader& header, base::ConstSpan data);
  EarlyMessages takeEarly() {
    return std::move(early_);
  }
  void onPull(uint64_t transfer, base::ConstSpan data);
  void onDone(uint64_t transfer, base::Error error);
  // Ends the connection once, releases everything that the peer cannot read,
  // tells the Handler when it has seen all frames. With `flush`, what was sent
  // leaves first.
  void fail(
      base::Error error,
      PeerMemory memory = PeerMemory::kMayRead,
      bool flush = false);
  // Around the delivery of each frame: a thread may still carry one to the
  // Handler while another sees the end of the connection.
  void deliveryBegins() {
    deliveries_.fetch_add(1);
  }
  void onSent(ucs_status_t status);
  // Sends what done() has put off.
  void acknowledge();

  ConnectionState state() const {
    return state_.load();
  }
  bool initiator() const {
    return initiator_;
  }
  // The peer may still be reading our memory.
  bool lending() const {
    return std::any_of(
        transfers_.begin(), transfers_.end(), [](const auto& entry) {
          return !entry.second.adopted;
        });
  }

 private:
  struct Unsent {
    base::Buffer head;
    std::vector<BulkSpan> bulk;
    Callback callback;
  };
  // Memory that the peer may still read.
  struct Transfer {
    base::Buffer data; // of a big frame
    std::vector<base::ConstSpan> spans;
    Callback callback;
    bool done = false; // the peer has said so
    bool adopted = false; // the peer keeps it, and reads nothing of ours
    base::Error error;
    uint32_t sending = 0; // pulls that the bulk channel still serves
  };

  void sendNow(Unsent frame);
  void sendActive(FrameHeader header, base::Buffer data);
  void setState(ConnectionState state);
  void deferCallback(Callback callback, base::Error error);
  void finishTransfer(uint64_t id);
  void pull(
      uint64_t transfer,
      uint32_t first,
      const std::vector<base::MutableSpan>& into,
      Callback callback);
  void watchProcess();
  void closeEndpoint(bool flush);

  const std::shared_ptr<UcxContext> context_;
  const uint64_t localToken_;
  const bool initiator_;
  // Written under the lock; closed() reads it from anywhere.
  std::atomic<ConnectionState> state_{ConnectionState::kOpening};
  std::atomic<int> deliveries_{1}; // one is the open connection itself
  base::Error ending_; // written before deliveries_ can reach 0
  ucp_ep_h endpoint_ = nullptr;
  Preamble peer_; // once established
  bool exposesMemory_ = false; // the peer may be able to read ours
  bool cmaUsable_ = false; // we can read the peer's
  std::string whyNoCma_;
  int pidFd_ = -1;
  std::deque<Unsent> unsent_;
  EarlyMessages early_;
  uint64_t nextTransfer_ = 1;
  std::unordered_map<uint64_t, Transfer> transfers_;
  std::vector<uint64_t> acknowledgements_; // transfers of the peer's
  bool acknowledgesSoon_ = false;
  std::unordered_set<uint64_t> pulls_; // receives on the bulk channel
};

} // namespace torch_rpc_ext::transport::ucx
