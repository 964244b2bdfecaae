#include "agent/pending_calls.h"

#include <algorithm>

namespace torch_rpc_ext::agent {

using torch::distributed::rpc::JitFuture;

namespace {

// The longest pause between two probes of a silent connection. With a longer
// pause the end of a connection would stay unnoticed. With a shorter one the
// probes would fill the receive buffer of a process that is stopped, and Linux
// gives up a connection whose buffer is full.
constexpr std::chrono::minutes kLongestPatience{1};

} // namespace

PendingCalls::PendingCalls(
    base::Poller& poller,
    std::chrono::milliseconds patience,
    Expired expired)
    : patience_(patience),
      expired_(std::move(expired)),
      timer_(poller, [this] { onTimer(); }),
      probing_(poller, [this] { onProbing(); }) {}

PendingCalls::~PendingCalls() {
  stop();
}

base::Error PendingCalls::add(PendingCall& call) {
  const Clock::time_point deadline = call.deadline();
  auto state = state_.lock();
  if (state->closed) {
    return state->closed;
  }
  const uint64_t id = state->nextId++;
  call.id = id;
  if (deadline != Clock::time_point::max()) {
    state->deadlines.emplace(deadline, id);
    // Calls with equal time-outs have ascending deadlines, so the timer mostly
    // is already set early enough.
    if (deadline < state->armed) {
      arm(*state);
    }
  }
  state->calls.emplace(id, std::move(call)); // the caller still reads call.id
  return {};
}

bool PendingCalls::setSent(
    uint64_t id,
    const transport::ConnectionPtr& connection,
    UntakenPtr untaken,
    std::unique_ptr<std::string>& rrefs) {
  auto state = state_.lock();
  auto it = state->calls.find(id);
  if (it == state->calls.end()) {
    return false;
  }
  it->second.connection = connection;
  it->second.untaken = std::move(untaken);
  it->second.holdsRRefs = it->second.rrefs != nullptr;
  rrefs = std::move(it->second.rrefs);
  if (state->probed == Clock::time_point::max()) {
    armProbing(*state, Clock::now());
  }
  return true;
}

void PendingCalls::setMailbox(uint64_t id, std::shared_ptr<Mailbox> mailbox) {
  auto state = state_.lock();
  auto it = state->calls.find(id);
  if (it != state->calls.end()) {
    it->second.mailbox = std::move(mailbox);
  }
}

void PendingCalls::setResult(
    uint64_t id,
    c10::intrusive_ptr<JitFuture> result) {
  auto state = state_.lock();
  auto it = state->calls.find(id);
  if (it != state->calls.end()) {
    it->second.result = std::move(result);
  }
}

c10::intrusive_ptr<JitFuture> PendingCalls::resultOf(uint64_t id) const {
  const auto state = state_.lock();
  auto it = state->calls.find(id);
  return it == state->calls.end() ? nullptr : it->second.result;
}

bool PendingCalls::setBeforeFailure(
    const torch::distributed::rpc::JitFuture& future,
    uint64_t id,
    std::function<void(std::exception_ptr)> hook) {
  const auto has = [&](const auto& entry) {
    return entry.second.future.get() == &future;
  };
  auto state = state_.lock();
  auto& calls = state->calls;
  auto it = calls.find(id);
  if (it == calls.end() || !has(*it)) {
    it = std::find_if(calls.begin(), calls.end(), has);
  }
  if (it == calls.end()) {
    return false;
  }
  it->second.beforeFailure = std::move(hook);
  return true;
}

std::shared_ptr<Mailbox> PendingCalls::mailboxOf(uint64_t id) const {
  const auto state = state_.lock();
  auto it = state->calls.find(id);
  return it == state->calls.end() ? nullptr : it->second.mailbox;
}

PendingCall PendingCalls::extract(State& state, Calls::iterator it) {
  PendingCall call = std::move(it->second);
  state.deadlines.erase({call.deadline(), call.id});
  state.calls.erase(it);
  return call;
}

std::optional<PendingCall> PendingCalls::take(uint64_t id) {
  auto state = state_.lock();
  auto it = state->calls.find(id);
  if (it == state->calls.end()) {
    return std::nullopt;
  }
  return extract(*state, it);
}

std::vector<PendingCall> PendingCalls::takeAll(
    const transport::Connection* connection) {
  auto state = state_.lock();
  std::vector<PendingCall> taken;
  for (auto it = state->calls.begin(); it != state->calls.end();) {
    auto current = it++;
    if (current->second.connection.get() == connection) {
      taken.push_back(extract(*state, current));
    }
  }
  return taken;
}

std::vector<PendingCall> PendingCalls::close(const base::Error& why) {
  auto state = state_.lock();
  state->closed = why;
  std::vector<PendingCall> taken;
  while (!state->calls.empty()) {
    taken.push_back(extract(*state, state->calls.begin()));
  }
  return taken;
}

bool PendingCalls::contains(uint64_t id) const {
  return state_.lock()->calls.count(id) != 0;
}

size_t PendingCalls::size() const {
  return state_.lock()->calls.size();
}

void PendingCalls::arm(State& state) {
  state.armed = state.deadlines.empty() ? Clock::time_point::max()
                                        : state.deadlines.begin()->first;
  timer_.set(state.armed);
}

void PendingCalls::onTimer() {
  std::vector<PendingCall> due;
  {
    auto state = state_.lock();
    if (state->stopped) {
      return;
    }
    const auto now = Clock::now();
    while (!state->deadlines.empty() &&
           state->deadlines.begin()->first <= now) {
      auto it = state->calls.find(state->deadlines.begin()->second);
      due.push_back(extract(*state, it));
    }
    arm(*state);
  }
  for (auto& call : due) {
    expired_(std::move(call));
  }
}

void PendingCalls::armProbing(State& state, Clock::time_point now) {
  state.probed = now;
  probing_.set(now + patience_);
}

void PendingCalls::onProbing() {
  // Only the oldest call of a connection counts: many calls would otherwise
  // make the connection probe all the time.
  std::unordered_map<transport::ConnectionPtr, const PendingCall*> oldest;
  std::vector<transport::ConnectionPtr> silent;
  {
    auto state = state_.lock();
    if (state->stopped) {
      return;
    }
    const auto now = Clock::now();
    const auto before = std::exchange(state->probed, Clock::time_point::max());
    if (!state->calls.empty()) {
      armProbing(*state, now);
    }
    for (const auto& [id, call] : state->calls) {
      if (call.connection != nullptr) {
        const auto*& known = oldest[call.connection];
        known = known == nullptr || call.sentAt < known->sentAt ? &call : known;
      }
    }
    for (const auto& [connection, call] : oldest) {
      if (isToProbe(*call, before, now)) {
        silent.push_back(connection);
      }
    }
  }
  for (const auto& connection : silent) {
    connection->probe();
  }
}

bool PendingCalls::isToProbe(
    const PendingCall& call,
    Clock::time_point after,
    Clock::time_point until) const {
  const auto waited = until - call.sentAt;
  auto period = patience_;
  while (period * 2 <= waited && period < kLongestPatience) {
    period *= 2;
  }
  return waited >= period && until - waited % period > after;
}

void PendingCalls::stop() {
  auto state = state_.lock();
  if (!state->stopped) {
    state->stopped = true;
    timer_.stop();
    probing_.stop();
  }
}

} // namespace torch_rpc_ext::agent
