// Finds out when a static group has come to rest.

#include "agent/group_shutdown.h"

#include "agent/message_types.h"
#include "agent/rpc_error.h"
#include "base/bytes.h"

#include <algorithm>
#include <future>
#include <memory>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kInterruptInterval{100};

std::vector<char> encodeRound(uint64_t round, int64_t active) {
  std::vector<char> bytes(16);
  base::ByteWriter writer({bytes.data(), bytes.size()});
  writer.u64(round);
  writer.i64(active);
  return bytes;
}

} // namespace

GroupShutdown::GroupShutdown(
    Group& group,
    Caller& caller,
    Answers& answers,
    Devices& devices,
    std::function<void()> checkInterrupt)
    : group_(group),
      caller_(caller),
      answers_(answers),
      devices_(devices),
      checkInterrupt_(std::move(checkInterrupt)) {}

void GroupShutdown::join(float timeout) {
  group_.events().groupEnds();
  const auto deadline = timeout > 0 ? Clock::now() + toMilliseconds(timeout)
                                    : Clock::time_point::max();
  do {
    waitForOwnCalls(deadline);
    waitForReaders(deadline);
    barrier(0, deadline);
  } while (barrier(caller_.openCalls(), deadline) != 0);
}

template <typename F>
bool GroupShutdown::waitInterruptibly(Clock::time_point deadline, F&& wait) {
  bool isOver = false;
  while (!isOver) {
    isOver = wait(kInterruptInterval);
    checkInterrupt_();
    if (Clock::now() > deadline) {
      return false;
    }
  }
  return true;
}

void GroupShutdown::waitForOwnCalls(Clock::time_point deadline) {
  int64_t open = 0;
  waitInterruptibly(deadline, [&](auto patience) {
    open = caller_.waitUntilNone(patience);
    return open == 0;
  });
  if (open != 0) {
    const std::string& self = group_.self().name_;
    throw RpcError(
        base::ErrorKind::kTimedOut,
        self,
        "shutdown timed out: worker \"" + self + "\" still has " +
            std::to_string(open) + " calls under way");
  }
}

void GroupShutdown::waitForReaders(Clock::time_point deadline) {
  if (!devices_.waitForReaders(deadline, checkInterrupt_)) {
    const std::string& self = group_.self().name_;
    throw RpcError(
        base::ErrorKind::kTimedOut,
        self,
        "shutdown timed out: other workers still copy the tensors of " +
            std::to_string(devices_.readMessages()) +
            " messages from the devices of \"" + self + "\"");
  }
}

int64_t GroupShutdown::barrier(int64_t active, Clock::time_point deadline) {
  const auto infos = group_.membership().all();
  // Upstream's _all_gather chooses the same worker, so connections to this
  // worker exist.
  const auto leader = std::min_element(
      infos.begin(), infos.end(), [](const auto& a, const auto& b) {
        return a.name_ < b.name_;
      });
  const auto future = caller_.ask(
      *leader,
      c10::make_intrusive<rpc::Message>(
          encodeRound(round_++, active),
          std::vector<at::Tensor>{},
          static_cast<rpc::MessageType>(kBarrierRequestType)),
      "the end of the group");

  // Shared with the callback, which may come after the wait.
  const auto done = std::make_shared<std::promise<void>>();
  future->addCallback([done](rpc::JitFuture&) { done->set_value(); });
  if (!waitInterruptibly(
          deadline, [whenDone = done->get_future()](auto patience) {
            return whenDone.wait_for(patience) == std::future_status::ready;
          })) {
    throw RpcError(
        base::ErrorKind::kTimedOut,
        leader->name_,
        "shutdown timed out: a worker of the group has not called shutdown(), "
        "or still has calls under way");
  }
  if (future->hasError()) {
    std::rethrow_exception(future->exception_ptr());
  }
  const auto answer = future->value().toCustomClass<rpc::Message>();
  base::ByteReader reader({answer->payload().data(), answer->payload().size()});
  const int64_t sum = reader.i64();
  if (reader.failed()) {
    throw RpcError(
        base::ErrorKind::kInvalid,
        leader->name_,
        "shutdown: the answer of worker \"" + leader->name_ +
            "\" is too short");
  }
  return sum;
}

void GroupShutdown::serve(Arrival& arrival) {
  auto decoded = arrival.decoder->finish();
  if (arrival.error || !decoded.ok()) {
    return;
  }
  const auto& payload = decoded.value()->payload();
  base::ByteReader reader({payload.data(), payload.size()});
  const uint64_t round = reader.u64();
  const int64_t active = reader.i64();
  if (reader.failed()) {
    return;
  }
  group_.barrier().arrive(
      group_.membership().all().size(),
      round,
      group_.peers().nameOf(arrival.connection.get()),
      active,
      [this, connection = arrival.connection, id = arrival.header().callId](
          const base::Error& error, int64_t sum) {
        if (error) {
          answers_.send(
              {connection, id},
              rpc::createExceptionResponse(
                  "a worker was lost during shutdown: " + error.message,
                  static_cast<int64_t>(id)));
          return;
        }
        std::vector<char> bytes(8);
        base::ByteWriter writer({bytes.data(), bytes.size()});
        writer.i64(sum);
        answers_.send(
            {connection, id},
            c10::make_intrusive<rpc::Message>(
                std::move(bytes),
                std::vector<at::Tensor>{},
                static_cast<rpc::MessageType>(kBarrierResponseType)));
      });
}

} // namespace torch_rpc_ext::agent
