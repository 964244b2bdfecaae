#include "agent/transports.h"

#include "agent/call_label.h"
#include "agent/rpc_error.h"
#include "base/synchronized.h"
#include "transport/fault/fault.h"
#include "transport/loopback/loopback.h"
#include "transport/ucx/context.h"
#include "wire/call_frame.h"

#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::agent {

namespace {

using transport::fault::Fault;

// Linux takes no longer pauses between a connection's probes.
constexpr double kLongestKeepaliveSeconds = 32767;

// Upstream's fault injection: the first `failures` attempts to send a message
// of a listed type suffer that list's fault. Each message of a type in
// messagesToDelay is delayed. Two attempts are of the same message if their
// payloads are equal.
class FaultRule {
 public:
  explicit FaultRule(FaultOptions options) : options_(std::move(options)) {}

  Fault operator()(base::ConstSpan head) {
    Fault fault;
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
    const Fault::Kind kind = kindFor(name);
    if (kind == Fault::Kind::kNone) {
      return fault;
    }
    const base::ConstSpan payload = frame.value().payload();
    auto failed = failed_.lock();
    int& times = (*failed)[std::string(
        static_cast<const char*>(payload.data), payload.size)];
    if (times < options_.failures) {
      ++times;
      fault.kind = kind;
      fault.message = torch::distributed::rpc::makeRPCError(
          "Send attempt failed intentionally for " + name,
          torch::distributed::rpc::RPCErrorType::INTENTIONAL_FAILURE);
    }
    return fault;
  }

 private:
  Fault::Kind kindFor(const std::string& name) const {
    const auto isIn = [&name](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    return isIn(options_.messagesToLose)   ? Fault::Kind::kLose
        : isIn(options_.messagesToCorrupt) ? Fault::Kind::kCorrupt
        : isIn(options_.messagesToForge)   ? Fault::Kind::kForge
        : isIn(options_.messagesToFail)    ? Fault::Kind::kFail
                                           : Fault::Kind::kNone;
  }

  const FaultOptions options_;
  // How often each message has failed, by payload.
  base::Synchronized<std::unordered_map<std::string, int>> failed_;
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
  transport::ucx::Options chosen = options.transport;
  chosen.keepaliveSeconds =
      std::min(chosen.keepaliveSeconds, kLongestKeepaliveSeconds);
  auto context = transport::ucx::UcxContext::create(chosen);
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
