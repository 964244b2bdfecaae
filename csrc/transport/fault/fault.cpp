#include "transport/fault/fault.h"

#include "base/boundary.h"
#include "base/synchronized.h"
#include "memory/shared_map.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <thread>
#include <unordered_map>
#include <utility>

namespace torch_rpc_ext::transport::fault {

namespace {

// Runs tasks later, on a thread of its own. stop() runs the tasks that still
// wait at once, and after() those that come after stop().
class Delayer {
 public:
  ~Delayer() {
    stop();
  }

  void after(double seconds, base::TaskPtr task) {
    auto state = state_.lock();
    if (state->stopped) {
      state.unlock();
      task->run();
      return;
    }
    if (!state->thread.joinable()) {
      state->thread = std::thread([this] { work(); });
    }
    state->waiting.emplace(
        Clock::now() +
            std::chrono::duration_cast<Clock::duration>(
                std::chrono::duration<double>(seconds)),
        std::move(task));
    changed_.notify_all();
  }

  void stop() {
    std::thread thread;
    {
      const auto state = state_.lock();
      state->stopped = true;
      thread.swap(state->thread);
      changed_.notify_all();
    }
    if (thread.joinable()) {
      thread.join();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct State {
    std::multimap<Clock::time_point, base::TaskPtr> waiting;
    bool stopped = false;
    std::thread thread; // runs work()
  };

  void work() {
    while (const base::TaskPtr task = next()) {
      base::caughtHere(base::Boundary::kTask, [&] { task->run(); });
    }
  }

  // Waits until a task is due, and takes it out. Null at the end.
  base::TaskPtr next() {
    auto state = state_.lock();
    for (;;) {
      state.wait(
          changed_, [&] { return state->stopped || !state->waiting.empty(); });
      const auto first = state->waiting.begin();
      if (first == state->waiting.end()) {
        return nullptr;
      }
      const auto due = first->first;
      if (state->stopped || Clock::now() >= due) {
        base::TaskPtr task = std::move(first->second);
        state->waiting.erase(first);
        return task;
      }
      state.waitUntil(changed_, due, [&] {
        return state->stopped || state->waiting.begin()->first < due;
      });
    }
  }

  std::condition_variable changed_;
  base::Synchronized<State> state_;
};

class FaultConnection final
    : public Connection,
      public std::enable_shared_from_this<FaultConnection> {
 public:
  FaultConnection(ConnectionPtr inner, const Rule& rule, Delayer& delayer)
      : inner_(std::move(inner)), rule_(rule), delayer_(delayer) {}

  void send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback)
      override {
    const Fault fault = rule_({head.data(), head.size()});
    if (fault.delaySeconds <= 0) {
      sendNow(fault, std::move(head), std::move(bulk), std::move(callback));
      return;
    }
    delayer_.after(
        fault.delaySeconds,
        base::makeTask([self = shared_from_this(),
                        fault,
                        head = std::move(head),
                        bulk = std::move(bulk),
                        callback = std::move(callback)]() mutable {
          self->sendNow(
              fault, std::move(head), std::move(bulk), std::move(callback));
        }));
  }
  void close() override {
    inner_->close();
  }
  void lose(const base::Error& why) override {
    inner_->lose(why);
  }
  void probe() override {
    inner_->probe();
  }
  PeerState peer() const override {
    return inner_->peer();
  }
  Distance distance() const override {
    return inner_->distance();
  }
  PathInfo path() const override {
    return inner_->path();
  }

 private:
  void sendNow(
      const Fault& fault,
      base::Buffer head,
      std::vector<BulkSpan> bulk,
      Callback callback) {
    switch (fault.kind) {
      case Fault::Kind::kNone:
        inner_->send(std::move(head), std::move(bulk), std::move(callback));
        return;
      case Fault::Kind::kFail:
        callback(base::notSent({base::ErrorKind::kPeerLost, fault.message}));
        return;
      case Fault::Kind::kLose: // the connection breaks at this end only
        inner_->lose({base::ErrorKind::kPeerLost, fault.message});
        callback(base::notSent({base::ErrorKind::kPeerLost, fault.message}));
        return;
      case Fault::Kind::kForge:
        // Imitates a peer that returns memory which nobody has sent to it.
        for (BulkSpan& span : bulk) {
          const auto own = memory::SharedMap::create(span.size);
          span.map = memory::SharedMap::open(
              getpid(), own->region().fd, own->region().id, span.size);
        }
        inner_->send(std::move(head), std::move(bulk), std::move(callback));
        return;
      case Fault::Kind::kCorrupt:
        sendCorrupted(std::move(head), std::move(bulk), std::move(callback));
        return;
    }
  }

  // Changes one bit of the last bulk buffer or, without bulk, of the last byte
  // of the head. The bulk memory belongs to the sender, so a changed copy is
  // sent.
  void sendCorrupted(
      base::Buffer head,
      std::vector<BulkSpan> bulk,
      Callback callback) {
    if (bulk.empty()) {
      head.data()[head.size() - 1] ^= std::byte{1};
      inner_->send(std::move(head), std::move(bulk), std::move(callback));
      return;
    }
    BulkSpan& last = bulk.back();
    auto copy = std::make_shared<base::Buffer>(last.size);
    std::memcpy(copy->data(), last.data, last.size);
    copy->data()[last.size / 2] ^= std::byte{1};
    last = BulkSpan{{copy->data(), copy->size()}};
    inner_->send(
        std::move(head),
        std::move(bulk),
        [copy, callback = std::move(callback)](const base::Error& error) {
          callback(error);
        });
  }

  const ConnectionPtr inner_;
  const Rule& rule_;
  Delayer& delayer_;
};

// Stands between the inner transport and its owner: passes the owner's calls
// down and the inner transport's Handler calls up, and shows the owner a
// FaultConnection in place of each inner connection.
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
  void setSecret(const std::string& secret) override {
    inner_->setSecret(secret);
  }
  bool trim(std::chrono::steady_clock::duration age) override {
    return inner_->trim(age);
  }
  void stop() override {
    delayer_.stop();
    inner_->stop();
  }

  std::string introduction() override {
    return handler_->introduction();
  }
  base::Error onAccept(
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
  std::shared_ptr<void> onFrameAhead(const ConnectionPtr& connection) override {
    return handler_->onFrameAhead(outer(connection));
  }
  void onClosed(const ConnectionPtr& connection, const base::Error& error)
      override {
    handler_->onClosed(outer(connection), error);
    outer_.lock()->erase(connection.get());
  }

 private:
  ConnectionPtr outer(const ConnectionPtr& inner) {
    const auto all = outer_.lock();
    ConnectionPtr& connection = (*all)[inner.get()];
    if (connection == nullptr) {
      connection = std::make_shared<FaultConnection>(inner, rule_, delayer_);
    }
    return connection;
  }

  const std::shared_ptr<Context> inner_;
  const Rule rule_;
  Delayer delayer_;
  Handler* handler_ = nullptr;
  base::Synchronized<std::unordered_map<Connection*, ConnectionPtr>> outer_;
};

} // namespace

std::shared_ptr<Context> wrap(std::shared_ptr<Context> inner, Rule rule) {
  return std::make_shared<FaultContext>(std::move(inner), std::move(rule));
}

} // namespace torch_rpc_ext::transport::fault
