#include "agent/unread_rrefs.h"

#include "agent/call_label.h"

#include <utility>

namespace torch_rpc_ext::agent {

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

void UnreadRRefs::runLater(const Hook& hook, Payload payload) {
  if (hook && payload != nullptr) {
    executor_.submitCompletion(
        base::makeTask(
            [&hook, payload = std::move(payload)] { hook(*payload); }));
  }
}

} // namespace torch_rpc_ext::agent
