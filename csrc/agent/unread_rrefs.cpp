#include "agent/unread_rrefs.h"

#include "agent/call_label.h"

#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

bool meansUnread(const base::Error& error, bool isOpen) {
  // If a way to the peer has ended, the peer may have all of the message.
  const bool aWayEnded = error.kind == base::ErrorKind::kPeerLost ||
      error.kind == base::ErrorKind::kShutDown;
  return error.notSent || (error && isOpen && !aWayEnded);
}

UnreadRRefs::UnreadRRefs(Executor& executor, AgentHooks& hooks)
    : executor_(executor),
      undelivered_(std::move(hooks.undelivered)),
      unread_(std::move(hooks.unread)) {}

void UnreadRRefs::undelivered(Payload payload) {
  runLater(undelivered_, std::move(payload));
}

void UnreadRRefs::undelivered(const Message& message) {
  undelivered(payloadWithRRefs(message));
}

void UnreadRRefs::unread(const Message& message) {
  runLater(unread_, payloadWithRRefs(message));
}

void UnreadRRefs::sent(
    uint64_t callId,
    const transport::Connection* connection,
    Payload payload) {
  requests_.lock()->insert_or_assign(
      callId, Request{connection, std::move(payload)});
}

void UnreadRRefs::judged(uint64_t callId, Read read) {
  auto request = requests_.lock()->extract(callId);
  if (!request.empty() && read == Read::kNo) {
    undelivered(std::move(request.mapped().payload));
  }
}

void UnreadRRefs::sendEnded(uint64_t callId) {
  auto requests = requests_.lock();
  const auto it = requests->find(callId);
  if (it == requests->end()) {
    return;
  }
  it->second.sendEnded = true;
  if (it->second.connection == nullptr) {
    requests->erase(it);
  }
}

void UnreadRRefs::ended(const transport::Connection* connection, bool gone) {
  std::vector<Payload> over;
  {
    auto requests = requests_.lock();
    for (auto it = requests->begin(); it != requests->end();) {
      Request& request = it->second;
      if (request.connection != connection) {
        ++it;
      } else if (gone || request.sendEnded) {
        over.push_back(std::move(request.payload));
        it = requests->erase(it);
      } else {
        // A thread may be about to give the request to the connection. Then
        // only the callback of that send says that the request has not left.
        request.connection = nullptr;
        ++it;
      }
    }
  }
  if (gone) {
    for (auto& payload : over) {
      undelivered(std::move(payload));
    }
  }
}

void UnreadRRefs::runLater(const Hook& hook, Payload payload) {
  if (hook && payload != nullptr) {
    executor_.submitCompletion(
        base::makeTask(
            [&hook, payload = std::move(payload)] { hook(*payload); }));
  }
}

} // namespace torch_rpc_ext::agent
