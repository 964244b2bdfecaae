#include "agent/pending_calls.h"

namespace torch_rpc_ext::agent {

PendingCalls::PendingCalls(base::Poller& poller, Expired expired)
    : expired_(std::move(expired)), timer_(poller, [this] { onTimer(); }) {}

PendingCalls::~PendingCalls() {
  stop();
}

uint64_t PendingCalls::add(PendingCall call) {
  std::lock_guard lock(mutex_);
  const uint64_t id = nextId_++;
  call.id = id;
  Entry entry{std::move(call), Clock::time_point::max()};
  if (entry.call.timeout.count() > 0) {
    entry.deadline = entry.call.sentAt + entry.call.timeout;
    deadlines_.emplace(entry.deadline, id);
    // Calls with equal time-outs have ascending deadlines, so the timer mostly
    // is already set early enough.
    if (entry.deadline < armed_) {
      armLocked();
    }
  }
  calls_.emplace(id, std::move(entry));
  return id;
}

void PendingCalls::setSent(
    uint64_t id,
    const transport::ConnectionPtr& connection,
    UntakenPtr untaken) {
  std::lock_guard lock(mutex_);
  auto it = calls_.find(id);
  if (it != calls_.end()) {
    it->second.call.connection = connection;
    it->second.call.untaken = std::move(untaken);
  }
}

void PendingCalls::setMailbox(uint64_t id, std::shared_ptr<Mailbox> mailbox) {
  std::lock_guard lock(mutex_);
  auto it = calls_.find(id);
  if (it != calls_.end()) {
    it->second.call.mailbox = std::move(mailbox);
  }
}

bool PendingCalls::setBeforeFailure(uint64_t id, std::function<void()> hook) {
  std::lock_guard lock(mutex_);
  auto it = calls_.find(id);
  if (it == calls_.end()) {
    return false;
  }
  it->second.call.beforeFailure = std::move(hook);
  return true;
}

std::shared_ptr<Mailbox> PendingCalls::mailboxOf(uint64_t id) const {
  std::lock_guard lock(mutex_);
  auto it = calls_.find(id);
  return it == calls_.end() ? nullptr : it->second.call.mailbox;
}

PendingCall PendingCalls::extractLocked(
    std::unordered_map<uint64_t, Entry>::iterator it) {
  PendingCall call = std::move(it->second.call);
  if (it->second.deadline != Clock::time_point::max()) {
    deadlines_.erase({it->second.deadline, it->first});
  }
  calls_.erase(it);
  return call;
}

std::optional<PendingCall> PendingCalls::take(uint64_t id) {
  std::lock_guard lock(mutex_);
  auto it = calls_.find(id);
  if (it == calls_.end()) {
    return std::nullopt;
  }
  return extractLocked(it);
}

std::vector<PendingCall> PendingCalls::takeAll(
    const transport::Connection* connection) {
  std::lock_guard lock(mutex_);
  std::vector<PendingCall> taken;
  for (auto it = calls_.begin(); it != calls_.end();) {
    auto current = it++;
    if (connection == nullptr ||
        current->second.call.connection.get() == connection) {
      taken.push_back(extractLocked(current));
    }
  }
  return taken;
}

std::vector<PendingCall> PendingCalls::takeAll() {
  return takeAll(nullptr);
}

bool PendingCalls::contains(uint64_t id) const {
  std::lock_guard lock(mutex_);
  return calls_.count(id) != 0;
}

size_t PendingCalls::size() const {
  std::lock_guard lock(mutex_);
  return calls_.size();
}

size_t PendingCalls::withDeadline() const {
  std::lock_guard lock(mutex_);
  return deadlines_.size();
}

void PendingCalls::armLocked() {
  armed_ =
      deadlines_.empty() ? Clock::time_point::max() : deadlines_.begin()->first;
  timer_.set(armed_);
}

void PendingCalls::onTimer() {
  std::vector<PendingCall> due;
  {
    std::lock_guard lock(mutex_);
    if (stopped_) {
      return;
    }
    const auto now = Clock::now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      auto it = calls_.find(deadlines_.begin()->second);
      due.push_back(extractLocked(it));
    }
    armLocked();
  }
  for (auto& call : due) {
    expired_(std::move(call));
  }
}

void PendingCalls::stop() {
  std::lock_guard lock(mutex_);
  if (!stopped_) {
    stopped_ = true;
    timer_.stop();
  }
}

} // namespace torch_rpc_ext::agent
