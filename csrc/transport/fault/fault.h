#pragma once

#include "transport/transport.h"

#include <functional>
#include <memory>
#include <string>

namespace torch_rpc_ext::transport::fault {

// What happens to one frame on its way out.
struct Fault {
  enum class Kind { kNone, kFail, kDrop, kTruncate, kReset, kLose, kCorrupt };
  Kind kind = Kind::kNone;
  double delaySeconds = 0;
  std::string message = "failed by injection"; // of kFail, kReset, kLose
};

// Asked for every frame that is sent, with its head; called from any thread.
using Rule = std::function<Fault(base::ConstSpan head)>;

// A transport that does to the frames of another one what `rule` says: so that
// faults can be tested with the code that runs in production.
std::shared_ptr<Context> wrap(std::shared_ptr<Context> inner, Rule rule);

} // namespace torch_rpc_ext::transport::fault
