// OpenCalls alone: how the answer to a call ends that call.

#include "agent/open_calls.h"
#include "agent/answer_wait.h"
#include "agent/failure_message.h"
#include "agent/hello.h"
#include "agent/membership.h"
#include "compat/torch_compat.h"
#include "sanitize/stress.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace torch_rpc_ext;
using agent::OpenCalls;
using stress::become;
using stress::require;
namespace rpc = torch::distributed::rpc;

namespace {

agent::AgentOptions options() {
  agent::AgentOptions made;
  made.transport.keepaliveSeconds = 0.02;
  return made;
}

struct Fixture {
  explicit Fixture(std::function<void(const std::string&)> undelivered = {})
      : hooks([&] {
          agent::AgentHooks made;
          made.undelivered = std::move(undelivered);
          // Throws what is no std::exception: those finish() takes for the
          // answer.
          made.decodeException = [this](const rpc::Message&) {
            return throws ? throw 1 : std::exception_ptr();
          };
          return made;
        }()) {}

  const agent::AgentOptions options = ::options();
  agent::Executor executor{1};
  metrics::Counters counters;
  agent::Membership membership{/*isStatic=*/true};
  agent::Peers peers{membership, {}, nullptr, nullptr};
  agent::AgentHooks hooks;
  agent::UnreadRRefs unreadRRefs{executor, hooks};
  bool throws = true;
  OpenCalls calls{options, executor, counters, peers, unreadRRefs, hooks};

  agent::PendingCall call() {
    agent::PendingCall made;
    made.future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    made.worker = "b";
    made.label = "f";
    calls.begin(made);
    return made;
  }
};

c10::intrusive_ptr<rpc::Message> answer(
    rpc::MessageType type = rpc::MessageType::SCRIPT_RET) {
  return c10::make_intrusive<rpc::Message>(
      std::vector<char>{}, std::vector<at::Tensor>{}, type);
}

void testAnAnswerThatCannotBeTaken() {
  Fixture f;
  agent::PendingCall call = f.call();
  const auto future = call.future;
  try {
    f.calls.finish(call, answer());
    require(false, "it throws");
  } catch (int) {
  }
  require(!future->completed() && call.future != nullptr, "still to be ended");
  f.calls.fail(std::move(call), {base::ErrorKind::kSystem, "no memory"});
  require(future->hasError(), "the caller has an error");
  require(
      f.calls.waitUntilNone(std::chrono::milliseconds(0)) == 0,
      "shutdown does not wait for it");
}

void testWhatThrowsBeforeAFailure() {
  Fixture f;
  agent::PendingCall call = f.call();
  const auto future = call.future;
  call.beforeFailure = [](const std::exception_ptr&) { throw 1; };
  f.calls.fail(std::move(call), {base::ErrorKind::kSystem, "no memory"});
  require(future->hasError(), "the caller has an error");
  require(
      f.calls.waitUntilNone(std::chrono::milliseconds(0)) == 0,
      "shutdown does not wait for it");
}

// The callee gives up a call when the time of the caller has passed. Its answer
// may come before this worker's timer has run.
void testAnErrorAfterTheTimeOutIsTheTimeOut() {
  Fixture f;
  f.throws = false;
  const auto endOf = [&](std::chrono::seconds age, rpc::MessageType type) {
    agent::PendingCall call = f.call();
    const auto future = call.future;
    call.timeout = std::chrono::milliseconds(1000);
    call.sentAt = agent::PendingCall::Clock::now() - age;
    f.calls.finish(call, answer(type));
    return future->hasError() ? future->tryRetrieveErrorMessage() : "a value";
  };
  using std::chrono::seconds;
  const std::string late = endOf(seconds(2), rpc::MessageType::EXCEPTION);
  require(
      late.find("set timeout (1000 ms)") != std::string::npos &&
          late.find("f on worker \"b\"") != std::string::npos,
      "the time-out, as always");
  require(
      endOf(seconds(-60), rpc::MessageType::EXCEPTION).find("timeout") ==
          std::string::npos,
      "in time the error is the callee's");
  require(
      endOf(seconds(2), rpc::MessageType::SCRIPT_RET) == "a value",
      "a value is welcome late, too");
  require(f.counters.callsTimedOut.load() == 1, "one time-out");
}

// More than 292 years do not fit into a time point.
void testTimeOutsOfCenturies() {
  using Clock = agent::PendingCall::Clock;
  Fixture f;
  f.throws = false;
  for (const float seconds :
       {1e10F, 1e30F, std::numeric_limits<float>::infinity()}) {
    agent::PendingCall call = f.call();
    const auto future = call.future;
    call.timeout = agent::toMilliseconds(seconds);
    call.sentAt = Clock::now();
    require(
        call.sentAt + call.timeout > call.sentAt + std::chrono::years(90),
        "a long time, but one that a clock can count");
    f.calls.finish(call, answer(rpc::MessageType::EXCEPTION));
    require(
        future->tryRetrieveErrorMessage().find("timeout") == std::string::npos,
        "no time-out");
  }
}

// Whether a call may still be sent, and that it ends: each exactly once.
void testCallsThatEndBeforeTheyAreSent() {
  Fixture f;
  auto& pending = f.calls.pending();
  agent::PendingCall first = f.call();
  agent::PendingCall second = f.call();
  require(!pending.add(first) && !pending.add(second), "calls under way");
  require(first.id != second.id, "each with its id");
  std::unique_ptr<std::string> none;
  require(pending.setSent(second.id, nullptr, nullptr, none), "may be sent");
  auto taken = pending.take(first.id); // by its time-out
  require(taken.has_value(), "it ends");
  require(
      !pending.setSent(first.id, nullptr, nullptr, none), "not sent any more");
  f.calls.fail(std::move(*taken), {base::ErrorKind::kTimedOut, ""});
  const base::Error end{base::ErrorKind::kShutDown, "this worker shut down"};
  for (auto& call : pending.close(end)) {
    require(call.id == second.id, "the other one");
    f.calls.fail(std::move(call), end);
  }
  agent::PendingCall late = f.call();
  require(pending.add(late).kind == end.kind, "no call is added any more");
  const auto future = late.future;
  f.calls.fail(std::move(late), end);
  require(future->hasError(), "and its caller hears");
  require(
      f.calls.waitUntilNone(std::chrono::milliseconds(0)) == 0,
      "shutdown does not wait for any");
}

// Counts the probes.
class Probed final : public transport::Connection {
 public:
  void send(
      base::Buffer /*head*/,
      std::vector<transport::BulkSpan> /*bulk*/,
      transport::Callback /*callback*/) override {}
  void close() override {}
  void probe() override {
    probes.fetch_add(1);
  }
  transport::PeerState peer() const override {
    return state;
  }
  transport::PathInfo path() const override {
    return {};
  }

  std::atomic<int> probes{0};
  transport::PeerState state = transport::PeerState::kOpen;
};

// A connection may have ended at the peer alone, and with it the answer.
void testACallWithoutAnAnswerProbesItsConnection() {
  using Clock = agent::PendingCall::Clock;
  Fixture f;
  f.executor.start();
  auto& pending = f.calls.pending();
  const auto connection = std::make_shared<Probed>();
  for (int round = 0; round < 2; ++round) {
    connection->probes = 0;
    agent::PendingCall call = f.call();
    call.sentAt = Clock::now();
    const auto begin = call.sentAt;
    require(!pending.add(call), "a call under way");
    std::unique_ptr<std::string> none;
    require(
        pending.setSent(call.id, connection, nullptr, none), "which is sent");
    become([&] { return connection->probes >= 3; }, "it asks again and again");
    const auto periods = (Clock::now() - begin) / std::chrono::milliseconds(20);
    require(periods >= 4, "but not more often than at 1, 2 and 4 periods");
    auto taken = pending.take(call.id);
    require(taken.has_value(), "it ends");
    f.calls.fail(std::move(*taken), {base::ErrorKind::kSystem, "the end"});
    // The next timer finds no call, and sets no other.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const int probes = connection->probes;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    require(connection->probes == probes, "a call that has ended asks nothing");
  }
  pending.stop();
  require(f.executor.stop(10000), "the executor ends");
}

// A call with RRefs that is being sent, over a connection of its own.
struct Sent {
  explicit Sent(Fixture& f) : calls(f.calls) {
    auto call = f.call();
    call.rrefs = std::make_unique<std::string>("a pickle");
    require(!calls.pending().add(call), "a call under way");
    id = call.id;
    require(calls.setSent(id, connection, nullptr), "which is sent");
  }
  void end(base::ErrorKind kind) const {
    calls.fail(std::move(*calls.pending().take(id)), {kind, "no"});
  }
  void answer(agent::Read read) const {
    const auto message =
        agent::makeFailure(base::ErrorKind::kRefused, "no", read);
    calls.answered(id, message->type());
  }
  void sendFails(const base::Error& error) const {
    calls.sendEnded(id, connection, error);
  }
  void sendEnds() const {
    sendFails({});
  }

  OpenCalls& calls;
  uint64_t id = 0;
  std::shared_ptr<Probed> connection = std::make_shared<Probed>();
};

void testWhichErrorsMeanThatThePeerHasNotRead() {
  const base::Error refused{base::ErrorKind::kOverloaded, "no memory"};
  const base::Error broken{base::ErrorKind::kPeerLost, "a lane broke"};
  require(agent::meansUnread(refused, /*isOpen=*/true), "it says so itself");
  require(!agent::meansUnread(refused, /*isOpen=*/false), "or something else");
  require(!agent::meansUnread(broken, /*isOpen=*/true), "it may have all");
  require(agent::meansUnread(base::notSent(broken), false), "it has nothing");
  require(!agent::meansUnread({}, /*isOpen=*/true), "it has all");
}

// If the callee does not read a request, nobody but the caller can release the
// RRefs in it. So the caller listens until it knows, whether or not the call
// has ended: by its time-out, or because a lane broke, which may have happened
// after the callee took the last piece.
void testTheRRefsOfARequestThatIsNotRead() {
  using base::ErrorKind;
  using transport::PeerState;
  const std::vector<std::pair<int, std::function<void(const Sent&)>>> ends{
      {0, [](const Sent& sent) { sent.answer(agent::Read::kYes); }},
      {1, [](const Sent& sent) { sent.answer(agent::Read::kNo); }},
      {1,
       [](const Sent& sent) {
         sent.sendFails({ErrorKind::kPeerLost, "the lane broke"});
         sent.answer(agent::Read::kNo);
       }},
      {0,
       [](const Sent& sent) {
         sent.sendFails({ErrorKind::kPeerLost, "the lane broke"});
         sent.answer(agent::Read::kYes);
       }},
      {1,
       [](const Sent& sent) {
         sent.sendFails({ErrorKind::kRefused, "it does not take the bulk"});
       }},
      {1,
       [](const Sent& sent) {
         sent.connection->state = PeerState::kBroken; // was never open
         sent.sendFails(base::notSent({ErrorKind::kPeerLost, "no"}));
         sent.calls.failAll(sent.connection.get(), {ErrorKind::kPeerLost, ""});
       }},
      {1,
       [](const Sent& sent) {
         sent.connection->state = PeerState::kDead;
         sent.calls.failAll(sent.connection.get(), {ErrorKind::kPeerLost, ""});
       }},
      {0,
       [](const Sent& sent) { // it may use what it has read
         sent.connection->state = PeerState::kBroken;
         sent.calls.failAll(sent.connection.get(), {ErrorKind::kPeerLost, ""});
         sent.sendFails({ErrorKind::kPeerLost, "the connection broke"});
       }},
      {1,
       [](const Sent& sent) { // it broke while this thread began to send
         sent.connection->state = PeerState::kBroken;
         sent.calls.failAll(sent.connection.get(), {ErrorKind::kPeerLost, ""});
         sent.sendFails(base::notSent({ErrorKind::kPeerLost, "no"}));
       }},
      {0,
       [](const Sent& sent) {
         sent.sendEnds();
         sent.connection->state = PeerState::kBroken;
         sent.calls.failAll(sent.connection.get(), {ErrorKind::kPeerLost, ""});
       }},
      {1,
       [](const Sent& sent) {
         sent.sendEnds();
         sent.connection->state = PeerState::kDead;
         sent.calls.failAll(sent.connection.get(), {ErrorKind::kPeerLost, ""});
       }},
  };
  for (const bool timesOut : {false, true}) {
    for (const auto& [expected, end] : ends) {
      std::atomic<int> released{0};
      Fixture f([&](const std::string&) { released.fetch_add(1); });
      f.throws = false;
      f.executor.start();
      const Sent sent(f);
      const Sent other(f); // nothing is heard of it
      if (timesOut) {
        sent.end(ErrorKind::kTimedOut);
      }
      end(sent);
      end(sent);
      sent.answer(agent::Read::kNo);
      f.calls.failAll({ErrorKind::kShutDown, "the end"});
      require(f.executor.stop(10000), "the executor ends");
      require(released == expected, "each is released once, or not");
    }
  }
}

// A wait in rounds of a second, for hours.
void testAWaitGivesTheFutureOneCallback() {
  Fixture f;
  f.executor.start();
  int rounds = 0;
  const std::runtime_error enough("enough");
  agent::AnswerWait wait(f.executor, f.calls.pending(), [&] {
    ++rounds == 3 ? throw enough : void();
  });
  const auto future =
      c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
  for (const bool leads : {false, true}) {
    rounds = 0;
    try {
      wait.await({.wait = &wait, .id = 1, .leads = leads}, *future);
    } catch (const std::runtime_error&) {
    }
    require(rounds == 3, "three rounds");
    require(
        compat::callbacks(*future) == (leads ? 2 : 1),
        "one callback for each wait");
  }
  require(f.executor.stop(10000), "the executor ends");
}

} // namespace

int main() {
  testAWaitGivesTheFutureOneCallback();
  testWhichErrorsMeanThatThePeerHasNotRead();
  testTheRRefsOfARequestThatIsNotRead();
  testACallWithoutAnAnswerProbesItsConnection();
  testCallsThatEndBeforeTheyAreSent();
  testTimeOutsOfCenturies();
  testAnErrorAfterTheTimeOutIsTheTimeOut();
  testAnAnswerThatCannotBeTaken();
  testWhatThrowsBeforeAFailure();
  return 0;
}
