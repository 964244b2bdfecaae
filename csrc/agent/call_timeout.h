#pragma once

#include <chrono>

namespace torch_rpc_ext::agent {

// The time-out of a call: `seconds` as the caller has given them, or `preset`
// where the caller gave upstream's kUnsetRpcTimeout; 0 is no time-out. Throws
// std::invalid_argument for negative numbers and NaN. Upstream accepts them,
// and gives up such a call at once or after an arbitrary time.
std::chrono::milliseconds callTimeout(
    float seconds,
    std::chrono::milliseconds preset);

} // namespace torch_rpc_ext::agent
