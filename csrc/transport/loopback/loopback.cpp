#include "transport/loopback/loopback.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace torch_rpc_ext::transport::loopback {

namespace {

class LoopbackContext;
class LoopbackConnection;

base::Error closedError() {
  return {base::ErrorKind::kPeerLost, "the connection is closed"};
}

} // namespace

// Owns: the list of contexts by address.
// Thread: any.
class Hub {
 public:
  std::string add(const std::weak_ptr<LoopbackContext>& context) {
    std::lock_guard lock(mutex_);
    std::string address = "loopback:" + std::to_string(next_++);
    contexts_[address] = context;
    return address;
  }
  std::shared_ptr<LoopbackContext> find(const std::string& address) {
    std::lock_guard lock(mutex_);
    auto it = contexts_.find(address);
    return it == contexts_.end() ? nullptr : it->second.lock();
  }

 private:
  std::mutex mutex_;
  uint64_t next_ = 0;
  std::unordered_map<std::string, std::weak_ptr<LoopbackContext>> contexts_;
};

namespace {

// The frame itself: what UCX would put into another process's memory.
class LoopbackIncoming final : public Incoming {
 public:
  LoopbackIncoming(
      base::Buffer head,
      std::vector<BulkSpan> bulk,
      Callback callback)
      : head_(std::move(head)),
        bulk_(std::move(bulk)),
        callback_(std::move(callback)) {
    for (const auto& span : bulk_) {
      sizes_.push_back(span.size);
    }
  }
  ~LoopbackIncoming() override {
    answer(
        bulk_.empty() ? base::Error{}
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
  void receive(std::vector<base::MutableSpan> into, Callback callback)
      override {
    for (size_t i = 0; i < into.size(); ++i) {
      if (into[i].size != 0) {
        std::memcpy(into[i].data, bulk_[i].data, into[i].size);
      }
    }
    callback({});
    answer({});
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
};

class LoopbackConnection final
    : public Connection,
      public std::enable_shared_from_this<LoopbackConnection> {
 public:
  explicit LoopbackConnection(std::shared_ptr<LoopbackContext> context)
      : context_(std::move(context)) {}

  void send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback)
      override;
  void close() override;
  bool closed() const override {
    std::lock_guard lock(mutex_);
    return peer_ == nullptr;
  }
  PathInfo path() const override {
    return {"loopback", "memcpy", ""};
  }

  void join(const std::shared_ptr<LoopbackConnection>& peer) {
    std::lock_guard lock(mutex_);
    peer_ = peer;
  }
  void deliver(std::unique_ptr<Incoming> incoming);
  void end(const base::Error& error);

 private:
  std::shared_ptr<LoopbackConnection> peer() {
    std::lock_guard lock(mutex_);
    return peer_;
  }

  const std::shared_ptr<LoopbackContext> context_;
  mutable std::mutex mutex_;
  std::shared_ptr<LoopbackConnection> peer_; // null once closed
};

class LoopbackContext final
    : public Context,
      public std::enable_shared_from_this<LoopbackContext> {
 public:
  explicit LoopbackContext(std::shared_ptr<Hub> hub) : hub_(std::move(hub)) {}

  void enter() {
    address_ = hub_->add(weak_from_this());
  }
  std::string address() const override {
    return address_;
  }
  void start(
      base::Poller& /*poller*/,
      base::TaskRunner& runner,
      Handler& handler) override {
    std::lock_guard lock(mutex_);
    runner_ = &runner;
    handler_ = &handler;
  }
  ConnectionPtr connect(const std::string& address, const std::string& hello)
      override;
  void stop() override;

  // Null once stopped.
  Handler* handler() {
    std::lock_guard lock(mutex_);
    return handler_;
  }
  void run(base::TaskPtr task) {
    std::lock_guard lock(mutex_);
    if (handler_ != nullptr) {
      runner_->submit(std::move(task));
    }
  }
  std::shared_ptr<LoopbackConnection> makeConnection() {
    auto connection = std::make_shared<LoopbackConnection>(shared_from_this());
    std::lock_guard lock(mutex_);
    connections_.push_back(connection);
    return connection;
  }

 private:
  const std::shared_ptr<Hub> hub_;
  std::string address_;
  std::mutex mutex_;
  base::TaskRunner* runner_ = nullptr;
  Handler* handler_ = nullptr;
  std::vector<std::shared_ptr<LoopbackConnection>> connections_;
};

void LoopbackConnection::send(
    base::Buffer head,
    std::vector<BulkSpan> bulk,
    Callback callback) {
  auto to = peer();
  if (!to) {
    if (callback) {
      callback(closedError());
    }
    return;
  }
  auto incoming = std::make_unique<LoopbackIncoming>(
      std::move(head), std::move(bulk), std::move(callback));
  to->context_->run(
      base::makeTask([to, incoming = std::move(incoming)]() mutable {
        to->deliver(std::move(incoming));
      }));
}

void LoopbackConnection::deliver(std::unique_ptr<Incoming> incoming) {
  Handler* handler = context_->handler();
  if (handler != nullptr && peer() != nullptr) {
    handler->onFrame(shared_from_this(), std::move(incoming));
  }
}

void LoopbackConnection::end(const base::Error& error) {
  std::shared_ptr<LoopbackConnection> old;
  {
    std::lock_guard lock(mutex_);
    old = std::exchange(peer_, nullptr);
  }
  Handler* handler = context_->handler();
  if (old != nullptr && handler != nullptr) {
    handler->onClosed(shared_from_this(), error);
  }
}

void LoopbackConnection::close() {
  auto other = peer();
  end({base::ErrorKind::kShutDown, "this worker closed the connection"});
  if (other) {
    other->end({base::ErrorKind::kShutDown, "the peer shut down"});
  }
}

ConnectionPtr LoopbackContext::connect(
    const std::string& address,
    const std::string& hello) {
  auto mine = makeConnection();
  auto other = hub_->find(address);
  Handler* theirs = other ? other->handler() : nullptr;
  if (theirs == nullptr) {
    run(base::makeTask([this, mine, address] {
      handler()->onClosed(
          mine, {base::ErrorKind::kPeerLost, "nobody at " + address});
    }));
    return mine;
  }
  auto peer = other->makeConnection();
  mine->join(peer);
  peer->join(mine);
  const base::Error refused = theirs->onAccept(peer, hello);
  const std::string answer = theirs->introduction();
  run(base::makeTask([this, mine, refused, answer]() mutable {
    Handler* own = handler();
    if (own == nullptr) {
      return;
    }
    const base::Error error = refused
        ? base::Error{base::ErrorKind::kRefused, refused.message}
        : own->onConnected(mine, answer);
    if (error) {
      mine->end(error);
    }
  }));
  return mine;
}

void LoopbackContext::stop() {
  std::vector<std::shared_ptr<LoopbackConnection>> connections;
  {
    std::lock_guard lock(mutex_);
    connections.swap(connections_);
  }
  for (auto& connection : connections) {
    connection->close();
  }
  std::lock_guard lock(mutex_);
  handler_ = nullptr;
}

} // namespace

std::shared_ptr<Hub> makeHub() {
  return std::make_shared<Hub>();
}

std::shared_ptr<Context> makeContext(std::shared_ptr<Hub> hub) {
  auto context = std::make_shared<LoopbackContext>(std::move(hub));
  context->enter();
  return context;
}

} // namespace torch_rpc_ext::transport::loopback
