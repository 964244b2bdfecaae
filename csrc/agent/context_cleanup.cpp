#include "agent/context_cleanup.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_resp.h>

#include <thread>
#include <utility>

namespace torch_rpc_ext::agent {

namespace autograd = torch::distributed::autograd;
namespace rpc = torch::distributed::rpc;

namespace {

thread_local const ContextCleanup::Serving* serving = nullptr;

} // namespace

ContextCleanup::Serving::Serving(
    const Message& request,
    const transport::Connection* from)
    : request_(request), from_(from), before_(std::exchange(serving, this)) {}

ContextCleanup::Serving::~Serving() {
  serving = before_;
}

c10::intrusive_ptr<rpc::JitFuture> ContextCleanup::send(
    const WorkerInfo& to,
    const c10::intrusive_ptr<Message>& message,
    std::chrono::milliseconds timeout) {
  if (isBack(to, *message)) {
    auto done = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
    done->markCompleted(
        c10::IValue(autograd::CleanupAutogradContextResp().toMessage()));
    return done;
  }
  const int64_t context =
      autograd::CleanupAutogradContextReq::fromMessage(*message)
          ->getContextId();
  auto answer = caller_.send(to, message, timeout, /*deviceMap=*/{});
  answer->addCallback([this, context, sender = std::this_thread::get_id()](
                          JitFuture& done) {
    if (done.hasError()) {
      return;
    }
    const auto end = [context] {
      autograd::DistAutogradContainer::getInstance().releaseContextIfPresent(
          context);
    };
    // A request of the peer that came before the answer, and still waits or
    // runs, may make the context again. And torch's retry thread sends with a
    // lock held that the end of a context may need, too; the answer may be
    // there before send() returns.
    if (executor_.runningRequests() != 0 ||
        std::this_thread::get_id() == sender) {
      executor_.submitRequest(base::makeTask(end));
    } else {
      end();
    }
  });
  return answer;
}

bool ContextCleanup::isBack(const WorkerInfo& to, const Message& message)
    const {
  return serving != nullptr && serving->request_.type() == message.type() &&
      serving->request_.payload() == message.payload() &&
      peers_.nameOf(serving->from_) == to.name_;
}

} // namespace torch_rpc_ext::agent
