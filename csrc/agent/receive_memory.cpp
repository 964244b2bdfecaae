#include "agent/receive_memory.h"

#include <string>
#include <utility>

namespace torch_rpc_ext::agent {

namespace {

constexpr int kTrimsPerIdleTime = 3;

} // namespace

ReceiveMemory::ReceiveMemory(
    const AgentOptions& options,
    base::TaskRunner& runner,
    base::Poller& poller,
    TrimOthers trimOthers)
    : idle_(toMilliseconds(options.receiveCacheIdleSeconds)),
      trimOthers_(std::move(trimOthers)),
      cache_(std::make_shared<memory::BufferCache>(options.receiveCacheBytes)),
      admission_(Admission::create(options.receiveBudgetBytes)),
      lender_(Lender::create(cache_, runner, poller)),
      timer_(poller, [this] { trim(); }) {}

void ReceiveMemory::trimLater() {
  if (!trimming_.exchange(true)) {
    timer_.set(base::Timer::Clock::now() + idle_ / kTrimsPerIdleTime);
  }
}

void ReceiveMemory::trim() {
  const Duration idle = memory::isShort() ? Duration::zero() : idle_;
  cache_->trim(idle);
  const bool more = trimOthers_(idle);
  trimming_.store(false);
  const auto stats = cache_->stats();
  if (more || stats.idleBlocks + stats.usedBlocks != 0) {
    trimLater();
  }
}

void ReceiveMemory::stop() {
  admission_->stop();
  lender_->stop();
  timer_.stop();
}

void ReceiveMemory::close() {
  cache_->close();
}

void ReceiveMemory::addTo(Metrics& metrics) const {
  const auto cache = cache_->stats();
  const auto received = admission_->load();
  const auto waiting = lender_->waiting();
  const auto add = [&metrics](const char* name, uint64_t number) {
    metrics[name] = std::to_string(number);
  };
  add("agent.receive_held_bytes", received.heldBytes);
  add("agent.receive_waiting_requests", received.waitingRequests);
  add("agent.receive_waiting_bytes", received.waitingBytes);
  add("agent.send_waiting_messages", waiting.messages);
  add("agent.send_waiting_bytes", waiting.bytes);
  add("agent.receive_cache_hits", cache.hits);
  add("agent.receive_cache_misses", cache.misses);
  add("agent.receive_cache_idle_bytes", cache.idleBytes);
  add("agent.receive_cache_used_bytes", cache.usedBytes);
}

} // namespace torch_rpc_ext::agent
