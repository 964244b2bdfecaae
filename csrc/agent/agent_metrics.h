#pragma once

#include "agent/executor.h"
#include "metrics/counters.h"

#include <map>
#include <string>
#include <unordered_map>

namespace torch_rpc_ext::agent {

// Name -> number, as rpc.get_metrics() and torch's getMetrics() return them.
// Each part of the agent adds its own entries.
using Metrics = std::unordered_map<std::string, std::string>;

void addMetrics(const metrics::Counters& counters, Metrics& metrics);
// To be called only while upstream's profiling of the GIL is on.
void addGilMetrics(const metrics::Counters& counters, Metrics& metrics);
void addMetrics(const Executor& executor, Metrics& metrics);

// Name -> distribution; times are in ns, sizes in bytes.
std::map<std::string, metrics::Distribution> histogramsOf(
    const metrics::Counters& counters);

} // namespace torch_rpc_ext::agent
