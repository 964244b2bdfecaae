// Group alone, over a fake transport, whose connections open, end and die when
// this program says so.

#include "agent/group.h"
#include "agent/hello.h"
#include "compat/torch_compat.h"
#include "sanitize/stress.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

using namespace torch_rpc_ext;
using agent::Group;
using agent::WorkerEvents;
using stress::require;
using transport::PeerState;

namespace {

class FakeConnection final : public transport::Connection {
 public:
  void send(base::Buffer, std::vector<transport::BulkSpan>, transport::Callback)
      override {}
  void close() override {
    state = PeerState::kClosed;
  }
  void lose(const base::Error&) override {
    state = PeerState::kDead;
  }
  PeerState peer() const override {
    return state;
  }
  transport::PathInfo path() const override {
    return {};
  }

  PeerState state = PeerState::kOpen;
};

class FakeContext final : public transport::Context {
 public:
  std::string address() const override {
    return "here";
  }
  void start(base::Poller&, base::TaskRunner&, transport::Handler&) override {}
  transport::ConnectionPtr connect(const std::string&, const std::string&)
      override {
    ++connects;
    if (meanwhile) {
      meanwhile();
    }
    last = std::make_shared<FakeConnection>();
    return last;
  }
  void stop() override {
    stopped = true;
  }

  int connects = 0;
  std::function<void()> meanwhile; // runs in connect()
  bool stopped = false;
  std::shared_ptr<FakeConnection> last;
};

// Drops all tasks: they release objects of torch's agent, and there is no agent
// here.
class Queue final : public base::TaskRunner {
 public:
  void submit(base::TaskPtr task) override {
    tasks.push_back(std::move(task));
  }
  std::vector<base::TaskPtr> tasks;
};

// A group of "a", which is this worker, and "b", and what its listeners were
// told.
struct Fixture {
  std::shared_ptr<FakeContext> remote = std::make_shared<FakeContext>();
  std::shared_ptr<FakeContext> loopback = std::make_shared<FakeContext>();
  Queue queue;
  std::vector<std::string> heard;
  Group group{
      Group::WorkerInfo(std::string("a"), int64_t{0}),
      /*isStatic=*/true,
      remote,
      loopback,
      queue,
      {.ended = [this](
                    const transport::ConnectionPtr&,
                    const base::Error&) { heard.push_back("ended"); },
       .lost =
           [this](const std::string& worker, bool exited) {
             heard.push_back(worker + (exited ? " exited" : " unreachable"));
           },
       .dropValues = nullptr}};

  Fixture() {
    group.peers().start();
    group.setSecret("id of the group", "secret");
    group.add("a", 0, "address of a", 0);
    group.add("b", 1, "address of b", 0);
    group.events().begin();
    require(next() == WorkerEvents::Kind::kBegan, "events begin");
  }

  WorkerEvents::Kind next() {
    const auto event = group.events().next(std::chrono::milliseconds(0));
    return event ? event->kind : WorkerEvents::Kind::kEnded;
  }
  // "b" connects in its life `life`.
  std::shared_ptr<FakeConnection> accept(uint32_t life, base::Error& error) {
    const auto connection = std::make_shared<FakeConnection>();
    error = group.onAccept(
        connection,
        agent::encode(agent::Hello{"id of the group", 1, "b", life}));
    return connection;
  }
};

const base::Error kLost{base::ErrorKind::kPeerLost, "no sign of life"};

void testConnectsOnceAndNoticesDeath() {
  Fixture f;
  require(f.group.isAlive("a") && f.remote->connects == 0, "is itself alive");
  require(f.group.isAlive("b") && f.group.isAlive("b"), "b is there");
  require(f.remote->connects == 1, "one connection, for all who ask");
  const auto connection = f.remote->last;
  connection->state = PeerState::kDead;
  f.group.onClosed(connection, kLost);
  require(!f.group.isAlive("b"), "b is lost");
  require(
      f.heard == std::vector<std::string>{"ended", "b exited"},
      "calls end first, then the worker");
  require(f.next() == WorkerEvents::Kind::kLost, "an event of it");
  require(f.queue.tasks.size() == 1, "what it held is released, and later");
}

void testBrokenWayIsNoExit() {
  Fixture f;
  base::Error error;
  const auto connection = f.accept(0, error);
  require(!error, "b may connect");
  connection->state = PeerState::kBroken;
  f.group.onClosed(connection, kLost);
  require(
      f.heard == std::vector<std::string>{"ended", "b unreachable"},
      "its process may still read from here");
  require(f.next() == WorkerEvents::Kind::kLost, "it is lost");
  f.accept(0, error);
  require(f.next() == WorkerEvents::Kind::kReturned, "it is back");
}

const base::Error kGoodbye{base::ErrorKind::kShutDown, "the peer shut down"};

// A call may come between the goodbye and the end of its connection.
void testAWorkerThatHasLeftIsNotConnectedToAgain() {
  Fixture f;
  auto& peers = f.group.peers();
  peers.connection(1);
  const auto connection = f.remote->last;
  connection->state = PeerState::kLeft;
  require(peers.connection(1) == connection, "calls fail with the goodbye");
  f.group.onClosed(connection, kGoodbye);
  require(peers.connection(1) == connection, "and later ones, too");
  require(f.remote->connects == 1, "nobody is there to connect to");
  require(f.next() == WorkerEvents::Kind::kLeft, "it left");
}

// Two workers that call each other at once have two connections.
void testTheEndOnOneConnectionIsForAll(
    PeerState end,
    const base::Error& why,
    WorkerEvents::Kind told) {
  Fixture f;
  auto& peers = f.group.peers();
  peers.connection(1);
  const auto first = f.remote->last;
  base::Error error;
  const auto second = f.accept(0, error);
  first->state = end;
  require(peers.connection(1) == first, "calls fail with it at once");
  f.group.onClosed(first, why);
  require(peers.connection(1) == first, "and later");
  require(f.next() == told, "an event of it");
  require(
      f.heard == std::vector<std::string>{"ended", "b exited"},
      "what it held is released");
  second->state = PeerState::kBroken;
  f.group.onClosed(second, kLost);
  require(peers.connection(1) == first, "whatever the other one says later");
  require(peers.isGone(1), "it is gone");
  require(f.remote->connects == 1, "nobody is there to connect to");
  f.group.add("b", 1, "another address", 1);
  require(peers.connection(1) == f.remote->last, "it has come back");
  require(f.remote->connects == 2, "at another address");
}

void testLeavesWhileThisWorkerConnects() {
  Fixture f;
  auto& peers = f.group.peers();
  base::Error error;
  const auto accepted = f.accept(0, error);
  accepted->state = PeerState::kBroken; // so that the call connects anew
  f.remote->meanwhile = [&] {
    const auto other = f.accept(0, error);
    other->state = PeerState::kLeft;
    f.group.onClosed(other, kGoodbye);
  };
  const auto connection = peers.connection(1);
  require(connection->peer() == PeerState::kLeft, "the call learns of it");
}

// An attempt to connect may begin before the goodbye and be answered after it.
void testAWorkerThatHasLeftIsNotBack() {
  Fixture f;
  base::Error error;
  const auto connection = f.accept(0, error);
  connection->state = PeerState::kLeft;
  f.group.onClosed(connection, kGoodbye);
  require(f.next() == WorkerEvents::Kind::kLeft, "it left");
  error = f.group.onConnected(
      std::make_shared<FakeConnection>(),
      agent::encode(agent::Hello{"id of the group", 1, "b", 0}));
  require(error.kind == base::ErrorKind::kShutDown, "nobody is there");
  require(f.group.peers().isLost("b"), "it is still lost");
  require(f.next() == WorkerEvents::Kind::kEnded, "no event says otherwise");
}

void testAnOpenConnectionServesBeforeOneThatConnects() {
  Fixture f;
  const auto& peers = f.group.peers();
  const auto attempt = f.group.peers().connection(1);
  require(attempt == f.remote->last, "this worker connects");
  f.remote->last->state = PeerState::kConnecting;
  base::Error error;
  const auto first = f.accept(0, error);
  require(
      f.group.peers().connection(1) == first,
      "calls do not wait for the attempt");
  f.accept(0, error);
  require(
      f.group.peers().connection(1) == first, "the first stays as it is open");
  require(!attempt->closed(), "the peer may be using the attempt");
  require(peers.paths().at("b").state == "open", "what calls to b now go over");
}

void testSuccessorEndsFormerLife() {
  Fixture f;
  base::Error error;
  const auto former = f.accept(0, error);
  f.group.add("b", 1, "another address", 1);
  require(former->state == PeerState::kDead, "its connections are lost");
  require(f.heard == std::vector<std::string>{"b exited"}, "it has ended");
  require(f.next() == WorkerEvents::Kind::kLost, "it died");
  require(f.next() == WorkerEvents::Kind::kReturned, "then it came back");
  f.accept(0, error);
  require(
      error.kind == base::ErrorKind::kRefused,
      "its former life is no member any more");
}

// A worker that comes back connects before this worker is told that the group
// has let it in. Calls reach it from then on.
void testWhatASuccessorOwns() {
  using torch::distributed::rpc::RRefId;
  const RRefId before(0, 1);
  const RRefId after(0, (int64_t{2} << 40) + 1);
  Fixture f;
  base::Error error;
  const auto former = f.accept(0, error);
  former->state = PeerState::kDead;
  f.group.onClosed(former, kLost);
  require(!f.group.ownerDied(before, 1), "a call says that the owner is lost");
  // Lives are counted for the whole group: another worker came back before.
  const auto successor = f.accept(2, error);
  require(compat::lifeOfRRefs() == 2, "new RRefs are the successor's");
  require(
      f.group.ownerDied(before, 1).kind == base::ErrorKind::kPeerLost,
      "the successor does not know the RRef");
  require(!f.group.ownerDied(after, 1), "it knows this one");
  f.group.add("b", 1, "another address", 2);
  require(!f.group.ownerDied(after, 1), "and still does as a member");
  compat::raiseLifeOfRRefs(1);
  require(compat::lifeOfRRefs() == 2, "an earlier life lowers nothing");
}

// A second process that takes the name of a worker that lives.
void testACopyOwnsNothing() {
  Fixture f;
  base::Error error;
  const auto first = f.accept(0, error);
  const auto copy = f.accept(1, error);
  require(
      !f.group.ownerDied(torch::distributed::rpc::RRefId(0, 1), 1),
      "calls still reach the first");
}

void testIsRemovedWhileItComesBack() {
  Fixture f;
  uint32_t life = 0;
  stress::Crowd crowd;
  crowd.add(1, [&](auto&) { f.group.add("b", 1, "another address", ++life); });
  crowd.add(1, [&](auto&) { f.group.remove("b"); });
  require(crowd.run(/*seconds=*/0.1) > 100, "no crash");
}

void testStrangersAreRefused() {
  Fixture f;
  const auto connection = std::make_shared<FakeConnection>();
  const auto error = f.group.onAccept(
      connection, agent::encode(agent::Hello{"another group", 1, "b", 0}));
  require(error.kind == base::ErrorKind::kRefused, "of another group");
  f.group.onClosed(connection, kLost);
  require(
      f.heard == std::vector<std::string>{"ended"}, "no member is gone by it");
}

// This worker may end as soon as its own answer is there.
void testTheLeaderOfABarrierIsToldLast() {
  Fixture f;
  std::vector<std::string> told;
  for (const std::string worker : {"a", "b"}) {
    f.group.barrier().arrive(
        2, /*round=*/0, worker, 0, [&told, worker](const auto&, int64_t) {
          told.push_back(worker);
        });
  }
  require(told == std::vector<std::string>{"b", "a"}, "others first");
}

void testLeaves() {
  Fixture f;
  f.group.isAlive("b");
  f.group.leave();
  f.remote->last->state = PeerState::kDead;
  f.group.onClosed(f.remote->last, kLost);
  require(f.queue.tasks.empty(), "nothing is released at the end");
  require(f.next() == WorkerEvents::Kind::kEnded, "no events at the end");
  f.group.stop();
  require(f.remote->stopped && f.loopback->stopped, "both transports stop");
}

} // namespace

int main() {
  testConnectsOnceAndNoticesDeath();
  testBrokenWayIsNoExit();
  testAWorkerThatHasLeftIsNotConnectedToAgain();
  testTheEndOnOneConnectionIsForAll(
      PeerState::kLeft, kGoodbye, WorkerEvents::Kind::kLeft);
  testTheEndOnOneConnectionIsForAll(
      PeerState::kDead, kLost, WorkerEvents::Kind::kLost);
  testLeavesWhileThisWorkerConnects();
  testAWorkerThatHasLeftIsNotBack();
  testAnOpenConnectionServesBeforeOneThatConnects();
  testSuccessorEndsFormerLife();
  testWhatASuccessorOwns();
  testACopyOwnsNothing();
  testIsRemovedWhileItComesBack();
  testStrangersAreRefused();
  testTheLeaderOfABarrierIsToldLast();
  testLeaves();
  return 0;
}
