// UcxAgent::join(): how a static group finds out that it has come to rest.
//
// All members wait until they have no call under way, then report to a leader,
// which answers when all have reported (barrier.h). Meanwhile a nested call may
// have begun somewhere, so they report once more, now with the number of their
// calls: when the sum is zero nothing can begin any more.

#include "agent/rpc_error.h"
#include "agent/ucx_agent.h"
#include "base/bytes.h"

#include <algorithm>

namespace torch_rpc_ext::agent {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kInterruptInterval = std::chrono::milliseconds(100);

std::vector<char> encodeRound(uint64_t round, int64_t active) {
  std::vector<char> bytes(16);
  base::ByteWriter writer({bytes.data(), bytes.size()});
  writer.u64(round);
  writer.i64(active);
  return bytes;
}

} // namespace

// A wait that deadlines and Ctrl-C can end. The future may outlive it.
struct UcxAgent::Waiter {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

void UcxAgent::join(bool /*shutdown*/, float timeout) {
  if (!isStaticGroup_ || !rpcAgentRunning_.load()) {
    return; // members of a dynamic group leave one by one
  }
  events_.groupEnds();
  const auto deadline = timeout > 0 ? Clock::now() +
          std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000))
                                    : Clock::time_point::max();
  do {
    waitForOwnCalls(deadline);
    waitForReaders(deadline);
    barrier(0, deadline);
  } while (barrier(counters_.clientActiveCalls.load(), deadline) != 0);
}

void UcxAgent::waitForOwnCalls(Clock::time_point deadline) {
  std::unique_lock lock(callCountMutex_);
  while (counters_.clientActiveCalls.load() != 0) {
    callCountChanged_.wait_for(lock, kInterruptInterval);
    lock.unlock();
    if (interruptCheck_) {
      interruptCheck_();
    }
    if (Clock::now() > deadline) {
      throw RpcError(
          base::ErrorKind::kTimedOut,
          workerInfo_.name_,
          "shutdown timed out: worker \"" + workerInfo_.name_ +
              "\" still has " +
              std::to_string(counters_.clientActiveCalls.load()) +
              " calls under way");
    }
    lock.lock();
  }
}

void UcxAgent::waitForReaders(Clock::time_point deadline) {
  const auto between = [this] {
    if (interruptCheck_) {
      interruptCheck_();
    }
  };
  if (!ipc_->waitUntilReleased(deadline, between)) {
    throw RpcError(
        base::ErrorKind::kTimedOut,
        workerInfo_.name_,
        "shutdown timed out: other workers still copy the tensors of " +
            std::to_string(ipc_->awaited()) +
            " messages from the devices of \"" + workerInfo_.name_ + "\"");
  }
}

int64_t UcxAgent::barrier(int64_t active, Clock::time_point deadline) {
  const auto infos = membership_.all();
  // The same choice as upstream's _all_gather: connections to it exist.
  const auto leader = std::min_element(
      infos.begin(), infos.end(), [](const auto& a, const auto& b) {
        return a.name_ < b.name_;
      });
  PendingCall call;
  call.future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
  call.worker = leader->name_;
  call.label = "the end of the group";
  call.sentAt = Clock::now();
  call.counted = false;
  const auto future = call.future;
  const uint64_t id = pending_.add(std::move(call));
  auto message = c10::make_intrusive<rpc::Message>(
      encodeRound(barrierRound_++, active),
      std::vector<at::Tensor>{},
      static_cast<rpc::MessageType>(kBarrierRequestType));
  auto encoded = encode(message, {id, wire::CallKind::kRequest, UINT64_MAX});
  try {
    sendCall(id, std::move(encoded.value()), peers_.connection(leader->id_));
  } catch (const std::exception&) {
    withdraw(id);
    throw;
  }

  auto waiter = std::make_shared<Waiter>();
  future->addCallback([waiter](rpc::JitFuture&) {
    std::lock_guard lock(waiter->mutex);
    waiter->done = true;
    waiter->changed.notify_all();
  });
  std::unique_lock lock(waiter->mutex);
  while (!waiter->done) {
    waiter->changed.wait_for(lock, kInterruptInterval);
    lock.unlock();
    if (interruptCheck_) {
      interruptCheck_();
    }
    if (Clock::now() > deadline) {
      throw RpcError(
          base::ErrorKind::kTimedOut,
          leader->name_,
          "shutdown timed out: some worker of the group has not reached it");
    }
    lock.lock();
  }
  if (future->hasError()) {
    std::rethrow_exception(future->exception_ptr());
  }
  const auto answer = future->value().toCustomClass<rpc::Message>();
  base::ByteReader reader({answer->payload().data(), answer->payload().size()});
  return reader.i64();
}

void UcxAgent::serveBarrier(
    const transport::ConnectionPtr& connection,
    uint64_t id,
    const rpc::Message& message) {
  const auto& payload = message.payload();
  base::ByteReader reader({payload.data(), payload.size()});
  const uint64_t round = reader.u64();
  const int64_t active = reader.i64();
  if (reader.failed()) {
    return;
  }
  barrier_.arrive(
      membership_.all().size(),
      round,
      peers_.nameOf(connection.get()),
      active,
      [this, connection, id](const base::Error& error, int64_t sum) {
        if (error) {
          reply(
              {connection, id},
              rpc::createExceptionResponse(
                  "a worker was lost during shutdown: " + error.message,
                  static_cast<int64_t>(id)));
          return;
        }
        std::vector<char> bytes(8);
        base::ByteWriter writer({bytes.data(), bytes.size()});
        writer.i64(sum);
        reply(
            {connection, id},
            c10::make_intrusive<rpc::Message>(
                std::move(bytes),
                std::vector<at::Tensor>{},
                static_cast<rpc::MessageType>(kBarrierResponseType)));
      });
}

} // namespace torch_rpc_ext::agent
