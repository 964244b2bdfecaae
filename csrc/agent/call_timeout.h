#pragma once

#include <chrono>

namespace torch_rpc_ext::agent {

// The time-out of a call whose caller has given `seconds`: kUnsetRpcTimeout of
// upstream's for `preset`, 0 for none. Throws std::invalid_argument for what is
// no time-out: upstream takes a negative one for one that is over already, and
// NaN for whatever the processor makes of NaN.
std::chrono::milliseconds callTimeout(
    float seconds,
    std::chrono::milliseconds preset);

} // namespace torch_rpc_ext::agent
