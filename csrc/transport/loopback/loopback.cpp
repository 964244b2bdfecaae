#include "transport/loopback/loopback.h"
#include "base/gate.h"
#include "base/synchronized.h"

#include <atomic>
#include <cstring>
#include <unordered_set>

namespace torch_rpc_ext::transport::loopback {

namespace {

class LoopbackContext;

// Holds the sent frame itself. With UCX, the frame would arrive in another
// process's memory.
class LoopbackIncoming final : public Incoming {
 public:
  LoopbackIncoming(
      base::Buffer head,
      std::vector<BulkSpan> bulk,
      Callback callback)
      : head_(std::move(head)),
        bulk_(std::move(bulk)),
        callback_(std::move(callback)),
        isTaken_(bulk_.empty()) {
    for (const auto& span : bulk_) {
      sizes_.push_back(span.size);
    }
  }
  ~LoopbackIncoming() override {
    answer(
        isTaken_ ? base::Error{}
                 : base::Error{
                       base::ErrorKind::kRefused,
                       "the receiver did not take the message"});
  }
  base::ConstSpan head() const override {
    return {head_.data(), head_.size()};
  }
  const std::vector<uint64_t>& bulkSizes() const override {
    return sizes_;
  }
  void refuse(const base::Error& why) override {
    answer(why);
  }
  void receive(std::vector<base::MutableSpan> into, Callback callback, Arrived)
      override {
    for (size_t i = 0; i < into.size(); ++i) {
      if (into[i].size != 0) {
        std::memcpy(into[i].data, bulk_[i].data, into[i].size);
      }
    }
    // The sender hears of it from the destructor, when the receiver is done
    // with the message: until then the sender holds what travels beside the
    // message.
    isTaken_ = true;
    callback({});
  }

 private:
  void answer(const base::Error& error) {
    if (Callback callback = std::exchange(callback_, nullptr)) {
      callback(error);
    }
  }

  base::Buffer head_;
  std::vector<BulkSpan> bulk_;
  std::vector<uint64_t> sizes_;
  Callback callback_;
  bool isTaken_;
};

// Thread: any.
class LoopbackConnection final
    : public Connection,
      public std::enable_shared_from_this<LoopbackConnection> {
 public:
  explicit LoopbackConnection(std::shared_ptr<LoopbackContext> context)
      : context_(std::move(context)) {}

  void send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback)
      override;
  void close() override {
    end({base::ErrorKind::kShutDown, "this worker closed the connection"});
  }
  PeerState peer() const override {
    return closed_.load() ? PeerState::kClosed : PeerState::kOpen;
  }
  Distance distance() const override {
    return Distance::kSameProcess;
  }
  PathInfo path() const override {
    return {toString(peer()), "loopback", "memcpy", ""};
  }

  void end(const base::Error& error);

 private:
  const std::shared_ptr<LoopbackContext> context_;
  std::atomic<bool> closed_{false};
};

// Owns: the connections that are not closed.
// Thread: any.
class LoopbackContext final
    : public Context,
      public std::enable_shared_from_this<LoopbackContext> {
 public:
  std::string address() const override {
    return "loopback";
  }
  void start(
      base::Poller& /*poller*/,
      base::TaskRunner& runner,
      Handler& handler) override {
    handler_.store(&handler);
    state_.lock()->runner = &runner;
  }
  ConnectionPtr connect(const std::string& address, const std::string& hello)
      override;
  void stop() override;

  // Runs `use` with the handler on a thread of the runner, unless the context
  // has stopped by then.
  template <typename F>
  void later(F use) {
    const auto state = state_.lock();
    if (state->runner != nullptr) {
      state->runner->submit(
          base::makeTask(
              [self = shared_from_this(), use = std::move(use)]() mutable {
                self->withHandler(use);
              }));
    }
  }
  // Calls `use` with the handler, unless the context has stopped. stop() waits
  // until `use` has returned.
  template <typename F>
  void withHandler(F&& use) {
    const base::Gate::Inside inside(gate_);
    Handler* const handler = handler_.load();
    if (inside.counted() && handler != nullptr) {
      use(*handler);
    }
  }
  // Keeps the connection for stop() to end. Returns false once stop() has
  // begun.
  bool keep(const std::shared_ptr<LoopbackConnection>& connection) {
    const auto state = state_.lock();
    return !state->stopping && state->connections.insert(connection).second;
  }
  void forget(const std::shared_ptr<LoopbackConnection>& connection) {
    state_.lock()->connections.erase(connection);
  }

 private:
  struct State {
    base::TaskRunner* runner = nullptr; // null before start() and after stop()
    bool stopping = false;
    std::unordered_set<std::shared_ptr<LoopbackConnection>> connections;
  };

  base::Gate gate_; // entered for each call of the Handler
  std::atomic<Handler*> handler_{nullptr}; // null before start()
  base::Synchronized<State> state_;
};

void LoopbackConnection::send(
    base::Buffer head,
    std::vector<BulkSpan> bulk,
    Callback callback) {
  if (closed()) {
    if (callback) {
      callback(
          base::notSent(
              {base::ErrorKind::kPeerLost, "the connection is closed"}));
    }
    return;
  }
  context_->later([self = shared_from_this(),
                   incoming = std::make_unique<LoopbackIncoming>(
                       std::move(head), std::move(bulk), std::move(callback))](
                      Handler& handler) mutable {
    if (!self->closed()) {
      handler.onFrame(self, std::move(incoming));
    }
  });
}

void LoopbackConnection::end(const base::Error& error) {
  if (!closed_.exchange(true)) {
    context_->forget(shared_from_this());
    context_->withHandler(
        [&](Handler& handler) { handler.onClosed(shared_from_this(), error); });
  }
}

ConnectionPtr LoopbackContext::connect(
    const std::string& /*address*/,
    const std::string& hello) {
  auto connection = std::make_shared<LoopbackConnection>(shared_from_this());
  base::Error error{base::ErrorKind::kShutDown, "this worker shuts down"};
  if (keep(connection)) {
    // onAccept() runs now and not with later(), because a frame that the caller
    // sends next may otherwise be delivered first.
    withHandler(
        [&](Handler& handler) { error = handler.onAccept(connection, hello); });
  }
  later([connection, error](Handler& handler) {
    const base::Error refused =
        error ? error : handler.onConnected(connection, handler.introduction());
    if (refused) {
      connection->end(refused);
    }
  });
  return connection;
}

void LoopbackContext::stop() {
  std::unordered_set<std::shared_ptr<LoopbackConnection>> connections;
  {
    const auto state = state_.lock();
    state->stopping = true;
    connections.swap(state->connections);
  }
  for (const auto& connection : connections) {
    connection->close();
  }
  state_.lock()->runner = nullptr;
  gate_.close();
  gate_.wait();
}

} // namespace

std::shared_ptr<Context> makeContext() {
  return std::make_shared<LoopbackContext>();
}

} // namespace torch_rpc_ext::transport::loopback
