#include "transport/fault/fault.h"

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace torch_rpc_ext::transport::fault {

namespace {

class FaultConnection final : public Connection {
 public:
  FaultConnection(ConnectionPtr inner, const Rule& rule)
      : inner_(std::move(inner)), rule_(rule) {}

  void send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback)
      override {
    const Fault fault = rule_({head.data(), head.size()});
    if (fault.delaySeconds > 0) {
      // On the sender's thread, as upstream's faulty agent does.
      std::this_thread::sleep_for(
          std::chrono::duration<double>(fault.delaySeconds));
    }
    switch (fault.kind) {
      case Fault::Kind::kNone:
        inner_->send(std::move(head), std::move(bulk), std::move(callback));
        return;
      case Fault::Kind::kFail:
        callback({base::ErrorKind::kPeerLost, fault.message});
        return;
      case Fault::Kind::kDrop:
        callback({});
        return;
      case Fault::Kind::kTruncate: {
        base::Buffer half(head.size() / 2);
        std::memcpy(half.data(), head.data(), half.size());
        inner_->send(std::move(half), std::move(bulk), std::move(callback));
        return;
      }
      case Fault::Kind::kReset:
        inner_->close();
        callback({base::ErrorKind::kPeerLost, fault.message});
        return;
    }
  }
  void close() override {
    inner_->close();
  }
  bool closed() const override {
    return inner_->closed();
  }
  PathInfo path() const override {
    return inner_->path();
  }

 private:
  const ConnectionPtr inner_;
  const Rule& rule_;
};

// Stands between the inner transport and the owner, on both sides, and
// translates connections.
class FaultContext final : public Context, public Handler {
 public:
  FaultContext(std::shared_ptr<Context> inner, Rule rule)
      : inner_(std::move(inner)), rule_(std::move(rule)) {}

  std::string address() const override {
    return inner_->address();
  }
  void start(base::Poller& poller, base::TaskRunner& runner, Handler& handler)
      override {
    handler_ = &handler;
    inner_->start(poller, runner, *this);
  }
  ConnectionPtr connect(const std::string& address, const std::string& hello)
      override {
    return outer(inner_->connect(address, hello));
  }
  bool trim(std::chrono::steady_clock::duration age) override {
    return inner_->trim(age);
  }
  void stop() override {
    inner_->stop();
  }

  base::Result<std::string> onAccept(
      const ConnectionPtr& connection,
      const std::string& hello) override {
    return handler_->onAccept(outer(connection), hello);
  }
  base::Error onConnected(
      const ConnectionPtr& connection,
      const std::string& hello) override {
    return handler_->onConnected(outer(connection), hello);
  }
  void onFrame(
      const ConnectionPtr& connection,
      std::unique_ptr<Incoming> incoming) override {
    handler_->onFrame(outer(connection), std::move(incoming));
  }
  void onClosed(const ConnectionPtr& connection, const base::Error& error)
      override {
    handler_->onClosed(outer(connection), error);
    std::lock_guard lock(mutex_);
    outer_.erase(connection.get());
  }

 private:
  ConnectionPtr outer(const ConnectionPtr& inner) {
    std::lock_guard lock(mutex_);
    ConnectionPtr& connection = outer_[inner.get()];
    if (connection == nullptr) {
      connection = std::make_shared<FaultConnection>(inner, rule_);
    }
    return connection;
  }

  const std::shared_ptr<Context> inner_;
  const Rule rule_;
  Handler* handler_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<Connection*, ConnectionPtr> outer_;
};

} // namespace

std::shared_ptr<Context> wrap(std::shared_ptr<Context> inner, Rule rule) {
  return std::make_shared<FaultContext>(std::move(inner), std::move(rule));
}

} // namespace torch_rpc_ext::transport::fault
