// OpenCalls alone: an answer that cannot be taken, because what takes it
// throws, leaves the call to fail(), which ends the call once.

#include "agent/open_calls.h"
#include "agent/hello.h"
#include "agent/membership.h"
#include "sanitize/stress.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

using namespace torch_rpc_ext;
using agent::OpenCalls;
using stress::require;
namespace rpc = torch::distributed::rpc;

namespace {

struct Fixture {
  agent::AgentOptions options;
  agent::Executor executor{1};
  metrics::Counters counters;
  agent::Membership membership;
  agent::Peers peers{membership, {}, nullptr, nullptr};
  // Throws what is no std::exception: those finish() takes for the answer.
  OpenCalls calls{
      options,
      executor,
      counters,
      peers,
      [](const rpc::Message&) -> std::exception_ptr { throw 1; }};

  agent::PendingCall call() {
    agent::PendingCall made;
    made.future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    made.worker = "b";
    made.label = "f";
    calls.begin(made);
    return made;
  }
};

c10::intrusive_ptr<rpc::Message> answer() {
  return c10::make_intrusive<rpc::Message>(
      std::vector<char>{},
      std::vector<at::Tensor>{},
      rpc::MessageType::SCRIPT_RET);
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
  call.beforeFailure = [] { throw 1; };
  f.calls.fail(std::move(call), {base::ErrorKind::kSystem, "no memory"});
  require(future->hasError(), "the caller has an error");
  require(
      f.calls.waitUntilNone(std::chrono::milliseconds(0)) == 0,
      "shutdown does not wait for it");
}

} // namespace

int main() {
  testAnAnswerThatCannotBeTaken();
  testWhatThrowsBeforeAFailure();
  return 0;
}
