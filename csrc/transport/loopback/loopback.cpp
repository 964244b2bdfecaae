#include "transport/loopback/loopback.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

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
  void receive(std::vector<base::MutableSpan> into, Callback callback, Arrived)
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
  PeerState peer() const override {
    std::lock_guard lock(mutex_);
    return peer_ == nullptr ? PeerState::kClosed : PeerState::kOpen;
  }
  bool loopsBack() const override {
    return true;
  }
  PathInfo path() const override {
    return {"loopback", "memcpy", ""};
  }

  // False when it has ended already.
  bool join(const std::shared_ptr<LoopbackConnection>& peer) {
    std::lock_guard lock(mutex_);
    peer_ = ended_ ? nullptr : peer;
    return !ended_;
  }
  void deliver(std::unique_ptr<Incoming> incoming);
  // For good, without a word. False when it had done so before, or was never
  // joined.
  bool part();
  void end(const base::Error& error);

 private:
  std::shared_ptr<LoopbackConnection> otherEnd() {
    std::lock_guard lock(mutex_);
    return peer_;
  }

  const std::shared_ptr<LoopbackContext> context_;
  mutable std::mutex mutex_;
  std::shared_ptr<LoopbackConnection> peer_; // null once closed
  bool ended_ = false;
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

  // Calls `use` with the handler, for which stop() waits; not once stopped.
  // Returns whether it did.
  template <typename F>
  bool withHandler(F&& use) {
    Handler* handler = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (handler_ == nullptr) {
        return false;
      }
      handler = handler_;
      ++uses_;
    }
    use(*handler);
    std::lock_guard lock(mutex_);
    if (--uses_ == 0) {
      unused_.notify_all();
    }
    return true;
  }
  void run(base::TaskPtr task) {
    std::lock_guard lock(mutex_);
    if (handler_ != nullptr) {
      runner_->submit(std::move(task));
    }
  }
  // Whether stop() will end the connection; not once it has begun.
  bool keep(const std::shared_ptr<LoopbackConnection>& connection) {
    std::lock_guard lock(mutex_);
    return !stopping_ && connections_.insert(connection).second;
  }
  void forget(LoopbackConnection* connection) {
    std::lock_guard lock(mutex_);
    connections_.erase(connection->shared_from_this());
  }

 private:
  const std::shared_ptr<Hub> hub_;
  std::string address_;
  std::mutex mutex_;
  base::TaskRunner* runner_ = nullptr;
  Handler* handler_ = nullptr; // null once stopped
  size_t uses_ = 0; // of the handler, now
  std::condition_variable unused_;
  bool stopping_ = false;
  std::unordered_set<std::shared_ptr<LoopbackConnection>> connections_;
};

void LoopbackConnection::send(
    base::Buffer head,
    std::vector<BulkSpan> bulk,
    Callback callback) {
  auto to = otherEnd();
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
  context_->withHandler([&](Handler& handler) {
    if (otherEnd() != nullptr) {
      handler.onFrame(shared_from_this(), std::move(incoming));
    }
  });
}

bool LoopbackConnection::part() {
  std::shared_ptr<LoopbackConnection> old;
  {
    std::lock_guard lock(mutex_);
    old = std::exchange(peer_, nullptr);
    ended_ = true;
  }
  context_->forget(this);
  return old != nullptr;
}

void LoopbackConnection::end(const base::Error& error) {
  if (part()) {
    context_->withHandler(
        [&](Handler& handler) { handler.onClosed(shared_from_this(), error); });
  }
}

void LoopbackConnection::close() {
  auto other = otherEnd();
  end({base::ErrorKind::kShutDown, "this worker closed the connection"});
  if (other) {
    other->end({base::ErrorKind::kShutDown, "the peer shut down"});
  }
}

ConnectionPtr LoopbackContext::connect(
    const std::string& address,
    const std::string& hello) {
  auto mine = std::make_shared<LoopbackConnection>(shared_from_this());
  auto other = hub_->find(address);
  bool joined = false;
  base::Error refused;
  std::string answer;
  const auto introduce = [&](Handler& theirs) {
    auto peer = std::make_shared<LoopbackConnection>(other);
    joined =
        keep(mine) && other->keep(peer) && mine->join(peer) && peer->join(mine);
    if (!joined) {
      mine->part(); // one of the two contexts is about to stop
      peer->part();
      return;
    }
    refused = theirs.onAccept(peer, hello);
    answer = theirs.introduction();
  };
  if (other == nullptr || !other->withHandler(introduce) || !joined) {
    run(base::makeTask([self = shared_from_this(), mine, address] {
      self->withHandler([&](Handler& own) {
        own.onClosed(
            mine, {base::ErrorKind::kPeerLost, "nobody at " + address});
      });
    }));
    return mine;
  }
  run(base::makeTask([self = shared_from_this(), mine, refused, answer] {
    self->withHandler([&](Handler& own) {
      const base::Error error = refused
          ? base::Error{base::ErrorKind::kRefused, refused.message}
          : own.onConnected(mine, answer);
      if (error) {
        mine->end(error);
      }
    });
  }));
  return mine;
}

void LoopbackContext::stop() {
  std::unordered_set<std::shared_ptr<LoopbackConnection>> connections;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    connections.swap(connections_);
  }
  for (auto& connection : connections) {
    connection->close();
  }
  std::unique_lock lock(mutex_);
  handler_ = nullptr;
  unused_.wait(lock, [this] { return uses_ == 0; });
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
