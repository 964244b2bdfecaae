#include "agent/call_timeout.h"

#include "agent/agent_options.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <stdexcept>
#include <string>

namespace torch_rpc_ext::agent {

std::chrono::milliseconds callTimeout(
    float seconds,
    std::chrono::milliseconds preset) {
  if (seconds == torch::distributed::rpc::kUnsetRpcTimeout) {
    if (preset.count() < 0) {
      throw std::invalid_argument(
          "the default time-out of calls is " + std::to_string(preset.count()) +
          " ms: give rpc._set_rpc_timeout() seconds, 0 for no time-out");
    }
    return preset;
  }
  if (!(seconds >= 0)) {
    throw std::invalid_argument(
        c10::str(
            "timeout must be a number of seconds, 0 for none, or -1 for the "
            "default of the options, got ",
            seconds));
  }
  return toMilliseconds(seconds);
}

} // namespace torch_rpc_ext::agent
