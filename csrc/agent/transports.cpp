#include "agent/transports.h"

#include "agent/call_label.h"
#include "agent/rpc_error.h"
#include "transport/fault/fault.h"
#include "transport/loopback/loopback.h"
#include "transport/ucx/context.h"
#include "wire/call_frame.h"

#include <torch/csrc/distributed/rpc/utils.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace torch_rpc_ext::agent {

namespace {

// Upstream's fault injection: the first `failures` attempts to send a message
// of a listed type fail; messages of other listed types are delayed. Two
// attempts are of the same message if their payloads are equal.
class FaultRule {
 public:
  explicit FaultRule(FaultOptions options)
      : options_(std::move(options)),
        failing_(
            options_.messagesToFail.begin(),
            options_.messagesToFail.end()),
        losing_(options_.messagesToLose.begin(), options_.messagesToLose.end()),
        corrupting_(
            options_.messagesToCorrupt.begin(),
            options_.messagesToCorrupt.end()),
        forging_(
            options_.messagesToForge.begin(),
            options_.messagesToForge.end()) {}

  transport::fault::Fault operator()(base::ConstSpan head) {
    transport::fault::Fault fault;
    auto frame = wire::CallFrameView::parse(head);
    if (!frame.ok()) {
      return fault;
    }
    const std::string name = nameOf(
        static_cast<torch::distributed::rpc::MessageType>(
            frame.value().header().messageType));
    auto delay = options_.messagesToDelay.find(name);
    if (delay != options_.messagesToDelay.end()) {
      fault.delaySeconds = delay->second;
    }
    const bool loses = losing_.count(name) != 0;
    const bool corrupts = corrupting_.count(name) != 0;
    const bool forges = forging_.count(name) != 0;
    if (failing_.count(name) == 0 && !loses && !corrupts && !forges) {
      return fault;
    }
    const base::ConstSpan payload = frame.value().payload();
    std::lock_guard lock(mutex_);
    int& failed = failed_[std::string(
        static_cast<const char*>(payload.data), payload.size)];
    if (failed < options_.failures) {
      ++failed;
      using Kind = transport::fault::Fault::Kind;
      fault.kind = loses ? Kind::kLose
          : corrupts     ? Kind::kCorrupt
          : forges       ? Kind::kForge
                         : Kind::kFail;
      fault.message = torch::distributed::rpc::makeRPCError(
          "Send attempt failed intentionally for " + name,
          torch::distributed::rpc::RPCErrorType::INTENTIONAL_FAILURE);
    }
    return fault;
  }

 private:
  const FaultOptions options_;
  const std::unordered_set<std::string> failing_;
  const std::unordered_set<std::string> losing_;
  const std::unordered_set<std::string> corrupting_;
  const std::unordered_set<std::string> forging_;
  std::mutex mutex_;
  std::unordered_map<std::string, int> failed_; // by payload
};

std::shared_ptr<transport::Context> withFaults(
    std::shared_ptr<transport::Context> context,
    const AgentOptions& options) {
  if (!options.faults.any()) {
    return context;
  }
  auto rule = std::make_shared<FaultRule>(options.faults);
  return transport::fault::wrap(
      std::move(context),
      [rule](base::ConstSpan head) { return (*rule)(head); });
}

} // namespace

std::shared_ptr<transport::Context> makeRemoteContext(
    const AgentOptions& options) {
  auto context = transport::ucx::UcxContext::create(options.transport);
  if (!context.ok()) {
    throw RpcError(context.error().kind, "", context.error().message);
  }
  return withFaults(context.value(), options);
}

std::shared_ptr<transport::Context> makeLoopbackContext(
    const AgentOptions& options) {
  return withFaults(transport::loopback::makeContext(), options);
}

} // namespace torch_rpc_ext::agent
